"""Pinned plans are read back unchanged, and plans that cannot be pinned are named."""

from dataclasses import replace

import pytest

from multiring._schedule import Accumulation, Collective, Wire
from multiring._topology import TCP, Rack, Topology
from multiring.errors import ArgumentError
from multiring.planner import Pins, Plan, Task, cheapest, pins_of, pins_text

RACKED = Topology(((0, 1), (2, 3)), rails=(TCP, TCP), racks=(Rack(hosts=(0,)), Rack(hosts=(1,))))
TASKS = [
    Task(collective=Collective.ALL_REDUCE, size_bytes=4096),
    Task(collective=Collective.ALL_REDUCE, size_bytes=32 << 20),
    Task(collective=Collective.ALL_REDUCE, size_bytes=1 << 20, accumulation=Accumulation.WIDE),
    Task(collective=Collective.BROADCAST, size_bytes=1 << 20, root=3),
    Task(collective=Collective.ALL_REDUCE, size_bytes=1 << 20, wire=Wire.INT8),
    Task(collective=Collective.ALL_TO_ALL, size_bytes=1 << 20),
]


def _plans() -> list[tuple[Task, Plan]]:
    return [(task, cheapest(task, RACKED)) for task in TASKS]


def test_what_is_written_is_read() -> None:
    plans = _plans()
    assert {plan.segment_bytes is None for _, plan in plans} == {True, False}
    assert pins_of(pins_text(plans, RACKED)) == Pins(RACKED.shape(), tuple(plans))


def test_a_plan_serves_from_its_size_to_the_next() -> None:
    pins = Pins(RACKED.shape(), tuple(_plans()))
    (_, small), (_, large), (_, wide), (_, broadcast), (_, coded), _ = pins.plans
    sizes = {4095: None, 4096: small, (32 << 20) - 1: small, 32 << 20: large, 1 << 30: large}
    assert {size: pins.find(replace(TASKS[0], size_bytes=size)) for size in sizes} == sizes
    assert pins.find(replace(TASKS[2], size_bytes=1 << 21)) == wide
    assert pins.find(TASKS[3]) == broadcast
    assert pins.find(TASKS[4]) == coded
    assert coded.wire is Wire.INT8
    assert pins.find(replace(TASKS[4], wire=Wire.FP16)) is None
    assert pins.find(replace(TASKS[3], root=0)) is None
    assert pins.find(Task(collective=Collective.ALL_GATHER, size_bytes=1 << 20)) is None


def test_another_topology_is_refused() -> None:
    pins = Pins(RACKED.shape(), ())
    pins.refuse_other(replace(RACKED, rails=(TCP, replace(TCP, latency_s=1.0)), names=("a", "b")))  # same shape
    for other in (replace(RACKED, racks=()), replace(RACKED, rails=(TCP,)), Topology(((0, 2), (1, 3)))):
        with pytest.raises(ArgumentError, match=r"of another topology .* make new ones with multiring plan --save"):
            pins.refuse_other(other)


def test_a_plan_that_codes_other_axes_is_refused() -> None:
    coded = TASKS[4]
    plain = cheapest(replace(coded, wire=Wire.NONE), RACKED)
    with pytest.raises(ArgumentError, match=r"plan of wire int8 has wires none on grid .*: want .*int8 because"):
        Pins(RACKED.shape(), ((coded, plain),)).refuse_other(RACKED)
    Pins(RACKED.shape(), tuple(_plans())).refuse_other(RACKED)


GOOD = pins_text(_plans()[:1], RACKED)


@pytest.mark.parametrize(
    ("old", "new", "match"),
    [
        ("shape = ", "shape = = ", "the pinned plans are not valid TOML"),
        ("shape = ", "shapes = ", "unknown key 'shapes'"),
        ('shape = "', 'shape = 3 # "', "shape = 3: want shape = TEXT"),
        ("root = 0", "root = 0\nroots = 1", "unknown key 'roots'; known are collective"),
        ("root = 0", "root = 'a'", "root = 'a': want a value from multiring plan --save"),
        ("root = 0", "root = 0\nsegment_bytes = 0", "segment_bytes = 0: want an integer > 0"),
        ('collective = "all_reduce"', 'collective = "reduce"', "for reduce is not valid: 'reduce' is not a valid"),
        ('accumulation = "same"', 'accumulation = "odd"', "for all_reduce is not valid: 'ODD'"),
        ('algorithm = "', 'algorithm = "un', "no algorithm 'un"),
        ("shares = [", "shares = [0, ", "want a positive integer for every channel"),
        ("order = [0, ", "order = [7, ", "want each of the 4 ranks"),
        ("root = 0", 'root = 0\nwire = "int4"', "for all_reduce is not valid: 'INT4'"),
        ("root = 0", "root = 0\nwires = [3]", "for all_reduce is not valid"),
        ("from_bytes = 4096", "from_bytes = -1", "size_bytes=-1"),
    ],
)
def test_what_cannot_be_is_named(old: str, new: str, match: str) -> None:
    assert GOOD.count(old) == 1
    with pytest.raises(ArgumentError, match=match):
        pins_of(GOOD.replace(old, new))


def test_plans_are_a_list_of_tables() -> None:
    with pytest.raises(ArgumentError, match=r"plans = 3: want \[\[plans\]\]"):
        pins_of("shape = 'x'\nplans = [3]")
