"""Named operations are matched by name, in whatever order the ranks post them."""

import gc
import random
import sys
import threading
import time
from ast import literal_eval
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.ranks import Here, run_ranks

import multiring
from multiring import Group, Handle
from multiring._runtime.named.handle import Start
from multiring._runtime.named.named import NamedOperations
from multiring._runtime.named.signature_text import label_of, meaning_of, shown
from multiring.errors import ArgumentError, DisagreementError, MismatchError, Signature, StateError, UnsupportedError


def all_reduce(named: NamedOperations, name: str, array: Any, op: str = "sum", really: str | None = None) -> Handle:
    signature = (
        ("operation", "allreduce"),
        ("data type", str(array.dtype)),
        ("shape", str(array.shape)),
        ("reduction operation", op),
    )
    return named.submit(name, signature, lambda group, label: group.all_reduce_async(array, really or op, label=label))


COLLECTIVES: dict[str, Callable[[Group, str], Any]] = {
    "all_reduce": lambda group, label: group.all_reduce(np.ones(3), label=label),
    "all_reduce_async": lambda group, label: group.all_reduce_async(np.ones(3), label=label).wait(),
    "broadcast": lambda group, label: group.broadcast(np.ones(3), label=label),
    "broadcast_async": lambda group, label: group.broadcast_async(np.ones(3), label=label).wait(),
    "reduce_scatter": lambda group, label: group.reduce_scatter(np.ones(3), label=label),
    "reduce_scatter_async": lambda group, label: group.reduce_scatter_async(np.ones(3), label=label).wait(),
    "all_gather": lambda group, label: group.all_gather(np.ones(group.rank), label=label),
    "all_gather_async": lambda group, label: group.all_gather_async(np.ones(group.rank), label=label).wait(),
    "all_to_all": lambda group, label: group.all_to_all(np.ones(6), label=label),
    "all_to_all_async": lambda group, label: group.all_to_all_async(np.ones(6), label=label).wait(),
    "barrier": lambda group, label: group.barrier(label=label),
    "barrier_async": lambda group, label: group.barrier_async(label=label).wait(),
}


def labelled(here: Here) -> bool:
    """Call every collective with labels. If labels differ, each rank gets all labels by group rank."""
    world = here.join()
    group = world.subgroup(list(reversed(range(here.size))))
    assert group is not None
    for name, call in COLLECTIVES.items():
        call(group, "the same")
        with pytest.raises(MismatchError) as mismatch:
            call(group, f"of {group.rank % 2}")
        assert {rank: title.partition(" labelled ")[2] for rank, title in mismatch.value.titles.items()} == {
            rank: f"of {rank % 2}" for rank in range(here.size)
        }, name
    for name in ("barrier", "all_reduce"):  # an unlabelled call does not repeat the labelled one
        with pytest.raises(MismatchError) as mismatch:
            COLLECTIVES[name](group, "one's" if group.rank == 0 else "")
        labels = [mismatch.value.titles[rank].partition(" labelled ")[2] for rank in range(here.size)]
        assert labels == ["one's", *[""] * (here.size - 1)]
    group.barrier()
    with pytest.raises(ArgumentError if group.rank == 1 else MismatchError) as wrong:
        group.all_reduce(np.ones(3), "sum" if group.rank != 1 else "mean", label="with a mistake")
    if isinstance(wrong.value, MismatchError):
        assert "failed with ArgumentError" in wrong.value.titles[1]
        assert wrong.value.titles[0].endswith(" labelled with a mistake")
    group.barrier()
    return True


@pytest.mark.parametrize("engine", ["shm", "tcp"])
def test_labels_are_agreed_on(engine: str) -> None:
    assert all(run_ranks(labelled, 3, engine=engine))


def in_order(here: Here) -> bool:
    named = NamedOperations(here.join())
    arrays = {f"tensor.{i}": np.full(i + 1, float(here.rank)) for i in range(100)}
    handles = {name: all_reduce(named, name, array) for name, array in arrays.items()}
    for name, handle in reversed(handles.items()):
        assert handle.wait() is None
        assert handle.done()
        assert (arrays[name] == sum(range(here.size))).all()
    for turn in range(6):  # a name is free again once its operation has ended
        total = np.ones(4)
        if here.rank == turn % here.size:
            time.sleep(0.02)
        handle = all_reduce(named, "again", total)
        while turn % 2 and not handle.done():  # an operation ends without a waiter
            time.sleep(0.001)
        handle.wait()
        assert (total == here.size).all()
    named.close()
    return True


@pytest.mark.parametrize("engine", ["shm", "tcp"])
def test_operations_in_the_same_order(engine: str) -> None:
    assert all(run_ranks(in_order, 3, engine=engine))


def name_in_flight(here: Here) -> bool:
    world = here.join()
    named = NamedOperations(world)
    if here.rank == 1:
        world.barrier()
    first = all_reduce(named, "twice", np.ones(3))
    if here.rank == 0:
        with pytest.raises(ArgumentError, match="operation 'twice' is in flight already"):
            all_reduce(named, "twice", np.ones(3))
        world.barrier()
    first.wait()
    all_reduce(named, "twice", np.ones(3)).wait()
    return True


def test_a_name_in_flight_is_refused() -> None:
    assert all(run_ranks(name_in_flight, 2))


def differing_terms(here: Here) -> str:
    named = NamedOperations(here.join())
    before = np.full(2 + (here.rank == 1), 7.0)
    handle = all_reduce(named, "of another shape", before)
    with pytest.raises(DisagreementError) as differ:
        handle.wait()
    assert (before == 7).all()
    assert {rank: dict(signature)["shape"] for rank, signature in differ.value.signatures.items()} == {
        0: "(2,)",
        1: "(3,)",
        2: "(2,)",
    }
    total = np.ones(3)
    all_reduce(named, "next", total).wait()
    assert (total == here.size).all()
    return str(differ.value)


@pytest.mark.parametrize("engine", ["shm", "tcp"])
def test_differing_terms_are_told_apart(engine: str) -> None:
    for text in run_ranks(differing_terms, 3, engine=engine):
        assert text == (
            "operation 'of another shape': the ranks do not agree on the shape: rank 1: (3,); ranks 0, 2: (2,);"
            " inputs are intact"
        )


def test_titles_are_read_by_any_thread_at_any_time() -> None:
    """Titles stay readable while another thread runs finalizers. Python 3.11's `ast.literal_eval` fails then."""
    signature: Signature = (("shape", "(2, 3)"), ("data type", "float32")) * 4
    title = f"all_reduce labelled {label_of('gradient', signature)}"

    def read(_thread: int) -> bool:
        told = True
        for _ in range(1000):
            Cycle()
            told &= meaning_of(title) == ("gradient", signature)
        return told

    thresholds, interval = gc.get_threshold(), sys.getswitchinterval()
    gc.set_threshold(50)
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(3) as pool:
            assert all(pool.map(read, range(3)))
    finally:
        gc.set_threshold(*thresholds)
        sys.setswitchinterval(interval)


class Cycle:
    """A reference cycle for the garbage collector, with a finalizer slow enough for other threads to run."""

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        for _ in range(100):
            pass


@pytest.mark.parametrize("name", ["", "gradient", " labelled ", 'it\'s "quoted"\n'])
def test_a_title_gives_its_meaning_back(name: str) -> None:
    signature: Signature = (("shape", "(2, 3)"), ("data type", "float32"))
    assert meaning_of(f"all_reduce labelled as {name} labelled {label_of(name, signature)}") == (name, signature)
    assert meaning_of(f"all_reduce labelled {name}") is None
    assert meaning_of("barrier") is None
    for own in ('["mine", [1]]', '["mine", [["one"]]]', '["mine", "words"]', "[" * 100_000):
        assert meaning_of(f"barrier labelled {own}") is None
    assert shown(f"all_reduce labelled {label_of(name, signature)}") == f"all_reduce, operation {name!r}"
    assert shown("barrier labelled mine") == "barrier labelled mine"


def nothing(signature: Signature) -> Start:
    """Return a function that contributes zeros for a rank that has joined."""
    said = dict(signature)
    if said["operation"] != "allreduce":
        raise UnsupportedError(f"nothing stands in for {said['operation']}")
    zeros = np.zeros(literal_eval(said["shape"]), said["data type"])
    return lambda group, label: group.all_reduce_async(zeros, said["reduction operation"], label=label)


def any_order(here: Here) -> bool:
    """Post operations in a random order on each rank, with blocking operations in between."""
    group = here.join()
    named = NamedOperations(group)
    chance = random.Random(here.rank)  # noqa: S311 -- to be the same again
    for turn in range(4):
        arrays = {f"{turn}.{i}": np.full(i + 1, float(here.rank)) for i in range(20)}
        order = chance.sample(list(arrays), len(arrays))
        handles = {name: all_reduce(named, name, arrays[name]) for name in order}
        for name in chance.sample(order, len(order)):
            if turn % 2:
                while not handles[name].done():
                    time.sleep(0.001)
            handles[name].wait(timeout=240)
            assert (arrays[name] == sum(range(here.size))).all()
        gathered = gather(named, f"rows {turn}", np.full((here.rank + 1, 2), here.rank)).wait()
        np.testing.assert_array_equal(gathered, np.repeat(range(here.size), range(1, here.size + 1))[:, None] * [1, 1])
    assert named._negotiation is not None
    with pytest.raises(DisagreementError, match=r"on the reduction operation:.* rank 1: max"):
        all_reduce(named, "odd", np.ones(2), "max" if here.rank == 1 else "sum").wait()
    with pytest.raises(ArgumentError if here.rank == 1 else MismatchError, match="want one of sum"):
        all_reduce(named, "wrong", np.ones(2), "sum", really="mean" if here.rank == 1 else "sum").wait()
    for _ in range(3):
        total = np.ones(2)
        all_reduce(named, "again", total).wait()
        assert (total == here.size).all()
    late = np.ones(2)
    if here.rank == 0:
        group.recv(np.zeros(1), 1)  # rank 1 has waited in vain
    handle = all_reduce(named, "late", late)
    if here.rank == 1:
        with pytest.raises(TimeoutError, match=r"operation 'late' is still in flight after 0.05 s"):
            handle.wait(timeout=0.05)
        with pytest.raises(ArgumentError, match="in flight already"):
            all_reduce(named, "late", late)
        group.send(np.zeros(1), 0)
    handle.wait()
    assert (late == here.size).all()
    pending = all_reduce(named, f"of rank {here.rank} alone", np.ones(2))
    named.close()
    with pytest.raises(StateError, match="these named operations were closed"):
        pending.wait()
    with pytest.raises(StateError, match="closed"):
        all_reduce(named, "too late", np.ones(2))
    return True


def gather(named: NamedOperations, name: str, array: Any) -> Handle:
    return named.submit(
        name, (("operation", "allgather"),), lambda group, label: group.all_gather_async(array, label=label)
    )


@pytest.mark.parametrize("engine", ["shm", "tcp"])
def test_operations_in_any_order(engine: str) -> None:
    assert all(run_ranks(any_order, 3, engine=engine))


def uneven(here: Here) -> bool:
    """Let ranks run out of data one after the other. All learn the last rank, and then start anew."""
    world = here.join()
    named = NamedOperations(world, nothing)
    for turn in range(3):
        handles = []
        for step in range(3 * here.rank + 1):
            total = np.ones(3)
            handles.append((all_reduce(named, f"step {step}", total), total, step))
            if turn == 1:
                handles[-1][0].wait()
        joining = named.join()
        assert joining.wait(timeout=240) in range(here.size)
        assert turn != 1 or joining.wait() == here.size - 1
        for handle, total, step in handles:
            handle.wait()
            assert (total == sum(step < 3 * rank + 1 for rank in range(here.size))).all()
        assert named._negotiation is None
        total = np.ones(3)
        all_reduce(named, "all again", total).wait()
        assert (total == here.size).all()
    assert named.join().wait() in range(here.size)  # all ranks at once
    if here.rank > 0:
        world.barrier()
    joining = named.join()
    if here.rank == 0:  # rank 0 joins first
        with pytest.raises(StateError, match="has joined"):
            named.join()
        with pytest.raises(StateError, match="has joined"):
            all_reduce(named, "more", np.ones(1))
        world.barrier()
    joining.wait()
    if here.rank > 0:
        with pytest.raises(MismatchError, match=r"failed with UnsupportedError: nothing stands in for allgather"):
            gather(named, "rows", np.ones(2)).wait()
    named.join().wait()
    return True


@pytest.mark.parametrize("engine", ["shm", "tcp"])
def test_join(engine: str) -> None:
    assert all(run_ranks(uneven, 3, engine=engine))


def alone(here: Here) -> bool:
    named = NamedOperations(here.join(), nothing)
    all_reduce(named, "alone", np.ones(3)).wait()
    return bool(named.join().wait() == 0)


def test_a_rank_alone_joins_at_once() -> None:
    assert all(run_ranks(alone, 1))


def cycles(here: Here) -> tuple[int, int]:
    """Join and leave often; return how many more threads and descriptors exist afterwards."""
    counts = []
    for cycle in range(30):
        named = NamedOperations(here.join())
        names = ["a", "b", "c"]
        handles = [all_reduce(named, name, np.ones(5)) for name in (names[::-1] if here.rank else names)]
        for handle in handles:
            handle.wait()
        if cycle % 2:
            named.close()
        multiring.shutdown()
        counts.append((threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))))
    return counts[-1][0] - counts[4][0], counts[-1][1] - counts[4][1]


@pytest.mark.parametrize("engine", ["shm", "tcp"])
def test_nothing_is_left_of_a_membership(engine: str) -> None:
    assert run_ranks(cycles, 2, engine=engine) == [(0, 0), (0, 0)]
