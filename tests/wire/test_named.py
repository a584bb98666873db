"""Named operations: matched by name, whatever order the ranks come to them in."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.wire.ranks import Here, run_ranks

from multiring import Group, Handle
from multiring.errors import ArgumentError, DisagreementError, MismatchError, Terms
from multiring.runtime.named import NamedOperations
from multiring.runtime.terms import label_of, meaning_of


def all_reduce(named: NamedOperations, name: str, array: Any, op: str = "sum") -> Handle:
    terms = (
        ("operation", "allreduce"),
        ("data type", str(array.dtype)),
        ("shape", str(array.shape)),
        ("reduction operation", op),
    )
    return named.submit(name, terms, lambda group, label: group.all_reduce_async(array, op, label=label))


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
    """Every collective takes a label; where labels differ, everybody learns everybody's, by rank of the group."""
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
    for _ in range(3):  # a name is free again once its operation has ended
        all_reduce(named, "again", np.ones(4)).wait()
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
    shapes = {rank: dict(terms)["shape"] for rank, terms in differ.value.terms.items()}
    assert shapes == {0: "(2,)", 1: "(3,)", 2: "(2,)"}
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


@pytest.mark.parametrize("name", ["", "gradient", " labelled ", 'it\'s "quoted"\n'])
def test_a_title_gives_its_meaning_back(name: str) -> None:
    terms: Terms = (("shape", "(2, 3)"), ("data type", "float32"))
    assert meaning_of(f"all_reduce labelled as {name} labelled {label_of(name, terms)}") == (name, terms)
    assert meaning_of(f"all_reduce labelled {name}") is None
    assert meaning_of("barrier") is None
