"""The entry for native code: a C library without Python sums, gathers, cancels and detects failures."""

import ctypes
import os
import subprocess
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.faults import kill
from tests.support.ranks import Here, report_of, run_ranks

from multiring._frontend import lifecycle
from multiring._frontend.requests import entry, error_of
from multiring.errors import MismatchError, PeerLostError

ROOT = Path(__file__).parents[2]
ALL_REDUCE, BROADCAST, ALL_GATHER, ALL_TO_ALL, REDUCE_SCATTER, BARRIER = range(6)
INT64, FLOAT32, COMPLEX64 = 4, 11, 13
AVERAGE, SUM = 0, 1
OK, ARGUMENT, MISMATCH, PEER_LOST, STALL, STATE, UNSUPPORTED, CANCELLED = range(8)


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    target = tmp_path_factory.mktemp("entry") / "entry_user.so"
    source = Path(__file__).parents[1] / "support" / "entry_user.c"
    compiler = [os.environ.get("CC", "cc"), "-std=c11", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-pthread"]
    subprocess.run([*compiler, f"-I{ROOT / 'native' / 'entry'}", str(source), "-o", str(target)], check=True)
    return str(target)


class User:
    """The C library and requests made through it."""

    def __init__(self, path: str) -> None:
        self.functions = ctypes.CDLL(path)
        address = ctypes.pythonapi.PyCapsule_GetPointer
        address.restype, address.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
        self.entry = address(entry(), b"multiring.entry")
        for name, result in (("user_start", ctypes.c_void_p), ("user_text", ctypes.c_char_p)):
            getattr(self.functions, name).restype = result
        self.functions.user_result.restype = ctypes.c_void_p
        self.functions.user_rows.restype = ctypes.c_int64
        self.functions.user_set_up(ctypes.cast(ctypes.pythonapi.PyGILState_Check, ctypes.c_void_p))

    def start(
        self,
        collective: int,
        arrays: Sequence[Any],
        kind: int,
        *,
        op: int = SUM,
        name: bytes | None = None,
        to: int = 0,
    ) -> Any:
        outputs = [None if collective in {ALL_GATHER, REDUCE_SCATTER} else np.empty_like(each) for each in arrays]
        count, dims = len(arrays), arrays[0].ndim if arrays else 0
        pointers = ctypes.c_void_p * max(1, count)
        shapes = (ctypes.c_int64 * max(1, count * dims))(*[dim for each in arrays for dim in each.shape])
        asked = self.functions.user_start(
            *(ctypes.c_void_p(self.entry), collective, kind, op, to, name, count),
            *(pointers(*[each.ctypes.data for each in arrays]),),
            *(pointers(*[None if each is None else each.ctypes.data for each in outputs]), shapes, dims),
        )
        return Asked(self.functions, ctypes.c_void_p(asked), outputs, arrays)

    @property
    def gil_was_held(self) -> int:
        found: int = self.functions.user_gil_was_held()
        return found


class Asked:
    def __init__(self, functions: Any, asked: Any, outputs: list[Any], inputs: Sequence[Any]) -> None:
        self.functions, self.asked, self.outputs = functions, asked, outputs
        self._inputs = inputs  # keeps the inputs alive until the operation ends

    def wait(self) -> int:
        """Wait without the GIL and return the error code."""
        error: int = self.functions.user_wait(self.asked)
        assert self.functions.user_ended(self.asked) == 1
        return error

    @property
    def text(self) -> str:
        found: bytes = self.functions.user_text(self.asked)
        return found.decode()

    def cancel(self) -> bool:
        return bool(self.functions.user_cancel(self.asked))

    def result(self, array: int, kind: Any, width: int = 1) -> Any:
        rows = self.functions.user_rows(self.asked, array)
        size = rows * width * np.dtype(kind).itemsize
        memory = (ctypes.c_char * size).from_address(self.functions.user_result(self.asked, array))
        return np.frombuffer(memory, kind).reshape(rows, width)


@cache
def user_of(path: str) -> User:
    lifecycle.init()
    return User(path)


def collectives(here: Here, path: str) -> None:
    user, own, ranks = user_of(path), here.rank, here.size
    for repeat in range(3):  # the second and third turn repeat the first post
        arrays = [np.full((3, size), own + repeat, np.float32) for size in (1, 1000, 0)]
        summed = user.start(ALL_REDUCE, arrays, FLOAT32, name=b"grouped")
        assert summed.wait() == OK, summed.text
        for output in summed.outputs:
            assert (output == sum(range(ranks)) + ranks * repeat).all()
        single = user.start(ALL_REDUCE, arrays[1:2], FLOAT32, op=AVERAGE)
        assert single.wait() == OK
        assert (single.outputs[0] == sum(range(ranks)) / ranks + repeat).all()
        rows = user.start(ALL_GATHER, [np.full((own + 1, 2), own, np.int64)], INT64, name=b"rows")
        assert rows.wait() == OK, rows.text
        assert rows.result(0, np.int64, 2)[:, 0].tolist() == np.repeat(range(ranks), range(1, ranks + 1)).tolist()
        assert rows.result(1, np.int64)[:, 0].tolist() == list(range(1, ranks + 1))
        part = user.start(REDUCE_SCATTER, [np.arange(5.0, dtype=np.float32).reshape(5, 1)], FLOAT32)
        assert part.wait() == OK
        mine = np.array_split(np.arange(5.0) * ranks, ranks)[own]
        assert part.result(0, np.float32)[:, 0].tolist() == mine.tolist()
    turned = user.start(ALL_REDUCE, [np.full((2, 2), 1j * own, np.complex64)], COMPLEX64)
    assert turned.wait() == OK
    assert (turned.outputs[0] == 1j * sum(range(ranks))).all()
    assert user.start(BARRIER, [], FLOAT32).wait() == OK
    together = [user.start(ALL_REDUCE, [np.ones((1, 4), np.float32)], FLOAT32, name=b"%d" % k) for k in range(20)]
    if own == 0:  # operations may end in any order
        together.reverse()
    assert [each.wait() for each in together] == [OK] * 20
    assert user.gil_was_held == 0


@pytest.mark.parametrize("engine", ["shm", "tcp"])
def test_a_c_library_sums_and_gathers(library: str, engine: str) -> None:
    run_ranks(collectives, 2, library, engine=engine)
    run_ranks(collectives, 3, library, engine=engine)


def other_orders(here: Here, path: str) -> None:
    user = user_of(path)
    names = [b"%d" % number for number in range(30)]
    if here.rank:
        names.reverse()
    asked = [
        (name, user.start(ALL_REDUCE, [np.full((1, 3), float(name), np.float32)], FLOAT32, name=name)) for name in names
    ]
    for name, each in asked:
        assert each.wait() == OK, each.text
        assert (each.outputs[0] == 2 * float(name)).all()


def test_requests_in_other_orders_meet_by_name(library: str) -> None:
    run_ranks(other_orders, 2, library)


def mistakes(here: Here, path: str) -> None:
    user, one = user_of(path), np.ones((2, 2), np.float32)
    differing = user.start(ALL_REDUCE, [np.ones((2, 2 + here.rank), np.float32)], FLOAT32, name=b"differing")
    assert differing.wait() == MISMATCH
    assert "rank 0: (2, 2); rank 1: (2, 3)" in differing.text
    assert isinstance(error_of(RuntimeError(f"the framework's words: {differing.text}")), MismatchError)
    scalar = user.start(ALL_GATHER, [np.array(1.0, np.float32)], FLOAT32)
    assert scalar.wait() == UNSUPPORTED, scalar.text
    assert user.start(ALL_REDUCE, [one], FLOAT32, to=9).wait() == ARGUMENT
    for collective, kind, op in ((17, FLOAT32, SUM), (ALL_REDUCE, 99, SUM), (ALL_REDUCE, FLOAT32, 6)):
        nonsense = user.start(collective, [one], kind, op=op)
        assert nonsense.wait() == ARGUMENT
        assert "multiring.h" in nonsense.text
    again = user.start(ALL_REDUCE, [one], FLOAT32)
    assert again.wait() == OK
    lifecycle.shutdown()
    late = user.start(ALL_REDUCE, [one], FLOAT32)
    assert late.wait() == STATE
    assert "init" in late.text


def test_mistakes_are_told_by_kind(library: str) -> None:
    run_ranks(mistakes, 2, library)


def cancelling(here: Here, path: str, told: str) -> tuple[int, float]:
    user = user_of(path)
    cancelled = Path(told)
    if here.rank == 0:
        until = time.monotonic() + 100
        while not cancelled.exists():
            assert time.monotonic() < until
            time.sleep(0.02)
        asked = user.start(ALL_REDUCE, [np.ones((1, 4), np.float32)], FLOAT32, name=b"late")
        return asked.wait(), 0.0
    lonely = user.start(ALL_REDUCE, [np.ones((1, 4), np.float32)], FLOAT32, name=b"late")
    time.sleep(0.2)
    started = time.monotonic()
    assert lonely.cancel()
    error = lonely.wait()
    took_s = time.monotonic() - started
    assert not lonely.cancel()
    cancelled.touch()
    return error, took_s


def test_a_cancelled_request_ends_here_at_once_and_for_the_others_when_they_come(library: str, tmp_path: Path) -> None:
    (late, _), (error, seconds) = run_ranks(cancelling, 2, library, str(tmp_path / "cancelled"))
    assert error == CANCELLED
    assert seconds < 60.0
    assert late not in {OK, CANCELLED}


def losing(here: Here, path: str) -> tuple[int, str]:
    user = user_of(path)
    error, text = OK, ""
    while error == OK:
        asked = user.start(ALL_REDUCE, [np.ones((1, 100), np.float32)], FLOAT32, name=b"step")
        error, text = asked.wait(), asked.text
        if here.rank == 1 and asked.wait() == OK:
            here.reach("a few steps")
    assert isinstance(error_of(RuntimeError(text)), PeerLostError)
    return error, text


def test_a_lost_rank_ends_requests_on_all_others(library: str) -> None:
    report = report_of(losing, 3, library, faults=[kill(1).at("a few steps")])
    for rank in (0, 2):
        error, text = report.outcomes[rank].value
        assert error == PEER_LOST
        assert "rank 1" in text
