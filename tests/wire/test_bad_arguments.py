"""Arguments that are wrong or differ between ranks raise a clear error on every rank; the group stays usable."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from tests.support.ranks import Here, run_ranks

from multiring import Group
from multiring.errors import ArgumentError, MismatchError, MultiringError, UnsupportedError

RANKS = 3
ODD = 1  # the rank that deviates
Call = Callable[[Group, Any], Any]


@dataclass(frozen=True, slots=True)
class Wrong:
    """The call `odd` of one rank while the others call `right`. If `error` is set, `odd` is wrong on its own."""

    name: str
    odd: Call
    right: Call
    told: str  # a pattern: the error of the others, or of all ranks
    error: type[MultiringError] | None = None
    own: str = ""  # a pattern: the odd rank's own error


class Stranger:
    """An array that looks to multiring like an array of a library that is not installed."""

    def __init__(self, device: int = 1) -> None:
        self._device = device

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device, 0

    def __dlpack__(self, **_: Any) -> object:
        raise BufferError("no memory to give")


class Nowhere(Stranger):
    def __dlpack_device__(self) -> tuple[int, int]:
        raise ValueError("this device is none of DLPack's")


class Nothing(Stranger):
    def __dlpack__(self, **_: Any) -> object:
        return 3


class Immutable(Stranger):
    """An array that looks to multiring like a jax.Array."""

    __module__ = "jaxlib.xla_extension"


def ones(*shape: int, dtype: str = "float32") -> Any:
    return np.ones(shape, dtype)


def read_only() -> Any:
    array = ones(4)
    array.setflags(write=False)
    return array


def reduce(array: Any, op: Any = "sum") -> Call:
    return lambda group, mine: group.all_reduce(mine if array is None else array, op)


def broadcast(array: Any, root: Any = 0) -> Call:
    return lambda group, _: group.broadcast(array, root)


RIGHT = reduce(None)
DIFFERENT = [
    Wrong("shape", reduce(ones(5)), RIGHT, r"rank 1: all_reduce sum float32 of shape \(5,\); ranks 0, 2: .*\(4,\)"),
    Wrong("dimensions", reduce(ones(2, 2)), RIGHT, r"rank 1: .*shape \(2, 2\); ranks 0, 2: .*\(4,\)"),
    Wrong("type", reduce(ones(4, dtype="int32")), RIGHT, r"rank 1: all_reduce sum int32.*; ranks 0, 2: .* float32"),
    Wrong("operation", reduce(None, "max"), RIGHT, r"rank 1: all_reduce max .*; ranks 0, 2: all_reduce sum"),
    Wrong("root", broadcast(ones(4), 1), broadcast(ones(4)), r"rank 1: broadcast from rank 1 .*; ranks 0, 2: .*rank 0"),
    Wrong(
        "layout",
        reduce(np.asfortranarray(ones(2, 3))),
        reduce(ones(2, 3)),
        r"rank 1: .*shape \(2, 3\), dimensions by stride \(1, 0\); ranks 0, 2: .*shape \(2, 3\);",
    ),
    Wrong("collective", broadcast(ones(4)), RIGHT, r"rank 1: broadcast from rank 0 .*; ranks 0, 2: all_reduce sum"),
    Wrong("barrier", lambda group, _: group.barrier(), RIGHT, r"rank 1: barrier; ranks 0, 2: all_reduce"),
    Wrong("steps", lambda group, mine: group.all_gather(mine), RIGHT, r"rank 1: all_gather .*; ranks 0, 2: all_reduce"),
    Wrong(
        "rows",
        lambda group, _: group.all_gather(ones(4, 3)),
        lambda group, _: group.all_gather(ones(4, 2)),
        r"rank 1: all_gather of float32 rows of 3; ranks 0, 2: all_gather of float32 rows of 2",
    ),
    Wrong(
        "types exchanged",
        lambda group, _: group.all_to_all(ones(3, dtype="int8")),
        lambda group, _: group.all_to_all(ones(3)),
        r"rank 1: all_to_all of int8 rows of scalar; ranks 0, 2: all_to_all of float32",
    ),
    Wrong(
        "scattered",
        lambda group, _: group.reduce_scatter(ones(7)),
        lambda group, _: group.reduce_scatter(ones(6)),
        r"rank 1: reduce_scatter sum float32 of shape \(7,\); ranks 0, 2: .*\(6,\)",
    ),
    Wrong(
        "members",
        lambda group, _: group.subgroup([0, 1]),
        lambda group, _: group.subgroup([1, 0]),
        r"rank 1: subgroup of ranks \[0, 1\]; ranks 0, 2: subgroup of ranks \[1, 0\]",
    ),
]


def alone(name: str, odd: Call, own: str, right: Call = RIGHT, error: type[MultiringError] = ArgumentError) -> Wrong:
    return Wrong(name, odd, right, rf"rank 1: \w+ failed with {error.__name__}: .*{own}.*; ranks 0, 2: ", error, own)


HALVES: Any = [1.5, 1, 0.5]
GATHER: Call = lambda group, mine: group.all_gather(mine)  # noqa: E731 -- a table's entry
SWAP: Call = lambda group, _: group.all_to_all(ones(3))  # noqa: E731
SCATTER: Call = lambda group, mine: group.reduce_scatter(mine)  # noqa: E731
PART: Call = lambda group, _: group.subgroup([0, 1])  # noqa: E731
WRONG_ALONE = [
    alone("no array", reduce([1.0, 2.0]), "list is no array; want NumPy, DLPack or the buffer protocol"),
    alone("gaps", reduce(ones(8)[::2]), r"shape \(4,\) and strides \(2,\) \(in elements\) has gaps or overlaps"),
    alone("gap between rows", reduce(ones(4, 5)[:, :4]), r"shape \(4, 4\) and strides \(5, 1\).* gaps"),
    alone("backwards", reduce(ones(4)[::-1]), r"strides \(-1,\).* gaps or overlaps"),
    alone("overlap", reduce(np.lib.stride_tricks.as_strided(ones(4), (3, 2), (4, 4))), "gaps or overlaps"),
    alone("odd strides", reduce(np.zeros(4, "u1, f4")["f1"]), r"strides \(5,\) \(in bytes\) of float32; want a dense"),
    alone("read-only", reduce(read_only()), r"shape \(4,\) is read-only; want one that can be written"),
    alone("read-only bytes", reduce(b"abcd"), "bytes is read-only; want memory that can be written"),
    alone("read-only at receiver", broadcast(read_only()), "is read-only", broadcast(ones(4))),
    alone("immutable", reduce(Immutable()), "jaxlib.xla_extension.Immutable is immutable; want an array that can"),
    alone("no memory", reduce(Stranger()), "Stranger does not expose its memory: no memory to give"),
    alone(
        "CUDA",
        reduce(Stranger(device=2)),
        "Stranger is in CUDA memory; want host memory",
        error=UnsupportedError,
    ),
    alone("device", reduce(Stranger(device=99)), "in DLPack device type 99 memory", error=UnsupportedError),
    alone("no device", reduce(Nowhere()), "Nowhere: this device is none of DLPack's", error=UnsupportedError),
    alone(
        "no tensor", reduce(Nothing()), "Nothing does not expose its memory: its __dlpack__ gives a tensor that cannot"
    ),
    alone("byte order", reduce(np.ones(4, ">f4")), "array of >f4 in foreign byte order"),
    alone("complex", reduce(ones(4, dtype="complex64")), "array of complex64: want one of bfloat16, bool"),
    alone("objects", reduce(np.array([None])), "array of object: want one of"),
    alone("unknown operation", reduce(None, "mean"), "op='mean': want one of sum, average, min, max, product"),
    alone("no operation", reduce(None, ["sum"]), r"op=\['sum'\]: want one of sum, average"),
    alone("average of bools", reduce(ones(4, dtype="bool"), "average"), ".*average"),
    alone("root beyond", broadcast(ones(4), 3), "root=3: want a rank of this group, 0 to 2", broadcast(ones(4))),
    alone("root below", broadcast(ones(4), -1), "root=-1: want a rank of this group", broadcast(ones(4))),
    alone("root of no type", broadcast(ones(4), "0"), "root='0': want a rank of this group", broadcast(ones(4))),
    alone("no rows", lambda group, _: group.all_gather(np.float32(1)[...]), "array of no dimensions", GATHER),
    alone("columns", lambda g, _: g.reduce_scatter(np.ones((3, 2), order="F")), "want the last dimension", SCATTER),
    alone("remainder", lambda g, _: g.all_to_all(ones(4)), "4 rows for 3 ranks: want a multiple, or splits", SWAP),
    alone("few splits", lambda g, _: g.all_to_all(ones(3), splits=[3]), r"splits=\[3\]: want 3 numbers", SWAP),
    alone("splits that miss", lambda g, _: g.all_to_all(ones(3), splits=[1, 1, 2]), r"\[1, 1, 2\]: want 3 num", SWAP),
    alone("negative split", lambda g, _: g.all_to_all(ones(3), splits=[4, -1, 0]), "splits=-1: want an integer", SWAP),
    alone("split in halves", lambda g, _: g.all_to_all(ones(3), splits=HALVES), "splits=1.5: want an int", SWAP),
    alone("small out", lambda g, mine: g.all_gather(mine, out=ones(3)), r"out of shape \(3,\), float32: want", GATHER),
    alone("other out", lambda g, m: g.reduce_scatter(m, out=ones(2, dtype="i4")), r"\(2,\), int32: want .*", SCATTER),
    alone("nobody", lambda g, _: g.subgroup([]), r"ranks=\[\]: want at least one rank, and no rank twice", PART),
    alone("twice", lambda g, _: g.subgroup([0, 0]), r"ranks=\[0, 0\]: want at least one rank, and no rank twice", PART),
    alone("outsider", lambda g, _: g.subgroup([0, 5]), "ranks=5: want a rank of this group, 0 to 2", PART),
]


def go_wrong(here: Here, table: str) -> list[tuple[str, str]]:
    """Make every mistake of the table; return (kind, text) of this rank's errors."""
    group = here.join()
    found = []
    for wrong in {"DIFFERENT": DIFFERENT, "WRONG_ALONE": WRONG_ALONE}[table]:
        mine = np.arange(4, dtype=np.float32)
        try:
            (wrong.odd if here.rank == ODD else wrong.right)(group, mine)
        except MultiringError as error:
            found.append((type(error).__name__, str(error)))
        else:
            found.append(("none", ""))
        assert mine.tolist() == [0, 1, 2, 3], f"{wrong.name}: the input was changed"
        total = np.ones(3)
        group.all_reduce(total)
        assert (total == RANKS).all(), f"{wrong.name}: the group is not usable"
    return found


@pytest.mark.parametrize("engine", ["shm", "tcp"])
def test_ranks_that_differ(engine: str) -> None:
    for found in run_ranks(go_wrong, RANKS, "DIFFERENT", engine=engine):
        for wrong, (kind, text) in zip(DIFFERENT, found, strict=True):
            assert kind == MismatchError.__name__, f"{wrong.name}: {kind} {text}"
            assert re.search(wrong.told, text), f"{wrong.name}: {text}"
            assert text.endswith("; inputs are intact"), f"{wrong.name}: {text}"


@pytest.mark.parametrize("engine", ["shm", "tcp"])
def test_one_rank_is_wrong(engine: str) -> None:
    for rank, found in enumerate(run_ranks(go_wrong, RANKS, "WRONG_ALONE", engine=engine)):
        for wrong, (kind, text) in zip(WRONG_ALONE, found, strict=True):
            assert wrong.error is not None
            want = (wrong.error.__name__, wrong.own) if rank == ODD else (MismatchError.__name__, wrong.told)
            assert kind == want[0], f"rank {rank}, {wrong.name}: {kind} {text}"
            assert re.search(want[1], text), f"rank {rank}, {wrong.name}: {text}"


def everyone_is_wrong(here: Here) -> list[str]:
    """Make the same mistake on all ranks: each raises its own error at once, without waiting for others."""
    group = here.join()
    told = []
    for call in (broadcast(ones(2), 9), reduce(ones(2), "xor"), reduce(ones(9)[::3])):
        with pytest.raises(ArgumentError) as wrong:
            call(group, None)
        told.append(str(wrong.value))
    group.barrier()
    return told


def test_everyone_is_wrong() -> None:
    for root, op, gaps in run_ranks(everyone_is_wrong, 2):
        assert root == "root=9: want a rank of this group, 0 to 1"
        assert op == "op='xor': want one of sum, average, min, max, product"
        assert "gaps" in gaps


def async_mistakes(here: Here) -> list[str]:
    """Check that a handle's wait raises the blocking call's error, and that other operations in flight succeed."""
    group = here.join()
    before, after = ones(100), ones(100)
    handles = [
        group.all_reduce_async(before),
        group.all_gather_async(ones(2, 2 + here.rank)),
        group.all_reduce_async(ones(4 + here.rank)),
        group.all_reduce_async(after),
    ]
    told = []
    for handle in handles:
        try:
            handle.wait()
        except MismatchError as error:
            told.append(str(error))
    assert (before == here.size).all()
    assert (after == here.size).all()
    return told


@pytest.mark.parametrize("engine", ["shm", "tcp"])
def test_async_mistakes(engine: str) -> None:
    for told in run_ranks(async_mistakes, 2, engine=engine):
        assert len(told) == 2
        assert "rank 0: all_gather of float32 rows of 2; rank 1: all_gather of float32 rows of 3" in told[0]
        assert "rank 0: all_reduce sum float32 of shape (4,); rank 1: " in told[1]


def message_mistakes(here: Here) -> list[str]:
    """Pass wrong arguments to messages. Disagreements raise on both sides, other mistakes only locally."""
    group = here.join()
    told = []

    def note(call: Callable[[], Any]) -> None:
        try:
            call()
        except MultiringError as error:
            told.append(f"{type(error).__name__}: {error}")

    other = 1 - here.rank
    if here.rank == 0:
        note(lambda: group.send(ones(3), 1))
        note(lambda: group.send("text", 1, tag=4))
    else:
        note(lambda: group.recv(ones(4), 0))
        note(lambda: group.recv(ones(4), 0, tag=4))
    note(lambda: group.send(ones(1), here.rank))
    note(lambda: group.recv(ones(1), 2))
    note(lambda: group.send(ones(1), other, tag=-1))
    note(lambda: group.send(ones(1), other, tag=0.5))  # type: ignore[arg-type]  # that is the mistake
    box = np.zeros(2)
    handle = group.recv_async(box, other)
    group.send(np.full(2, 1.0 + here.rank), other)
    handle.wait()
    assert (box == 2.0 - here.rank).all()
    return told


@pytest.mark.parametrize("engine", ["shm", "tcp"])
def test_message_mistakes(engine: str) -> None:
    by_rank = run_ranks(message_mistakes, 2, engine=engine)
    for rank, told in enumerate(by_rank):
        assert re.match(r"MismatchError: .*\(3,\).*\(4,\)", told[0]), told[0]
        kind = ("ArgumentError: ", "MismatchError: .*")[rank]
        assert re.match(rf"{kind}.*str is no array", told[1]), told[1]
        assert told[2] == f"ArgumentError: send: rank {rank} is this rank itself; copy the array instead"
        assert told[3] == "ArgumentError: source=2: want a rank of this group, 0 to 1"
        assert told[4:] == [
            "ArgumentError: tag=-1: want an integer >= 0",
            "ArgumentError: tag=0.5: want an integer >= 0",
        ]


def allocation_mistakes(here: Here) -> list[str]:
    group = here.join()
    told = []
    for shape, dtype in (
        (-1, "float32"),
        ((2, -3), "int8"),
        (2.5, "int8"),
        (3, "float8"),
        (3, "datetime64"),
        (3, None),
    ):
        try:
            group.allocate(shape, dtype)  # type: ignore[arg-type]  # that is the mistake
        except ArgumentError as error:
            told.append(str(error))
        else:
            told.append("")
    return told


def test_allocation_mistakes() -> None:
    (told,) = run_ranks(allocation_mistakes, 1)
    assert told[:3] == [f"shape={value}: want an integer >= 0" for value in (-1, -3, 2.5)]
    assert told[3].startswith("type float8: want one of bfloat16, bool, ")
    assert told[4].startswith("type datetime64: want one of ")
    assert told[5] == ""  # numpy's own default, which is valid
