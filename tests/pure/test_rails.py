"""Rails before and during transfers: their shares in the topology, and the detection of a slow one."""

import pytest

from multiring._runtime.rails.select import RailEndpoint, Traffic, slow_rails, topology_with
from multiring._topology import TCP, Link, OwnRails, Rack, Topology

FAST = Link(latency_s=1e-6, overhead_s=1e-6, bandwidth_bytes_per_s=4e9, reduce_bytes_per_s=5e9)
HOSTS = ((0, 1), (2,))


def places(*rails: tuple[str, float | None]) -> list[list[RailEndpoint]]:
    return [
        [RailEndpoint(name, f"10.0.{number}.{rank}", 1, rate) for number, (name, rate) in enumerate(rails)]
        for rank in range(3)
    ]


def test_rates_that_were_given_are_planned_with() -> None:
    found = topology_with(Topology(HOSTS), places(("a", 8e9), ("b", None)))
    assert [link.bandwidth_bytes_per_s for link in found.rails] == [1e9, TCP.bandwidth_bytes_per_s]
    assert found.own_rails == ()


def test_a_host_may_have_rates_of_its_own() -> None:
    told = places(("a", 8e9))
    told[2] = [told[2][0]._replace(bits_per_s=4e9)]
    found = topology_with(Topology(HOSTS), told)
    assert found.rails_of(0)[0].bandwidth_bytes_per_s == 1e9
    assert found.rails_of(1)[0].bandwidth_bytes_per_s == 0.5e9


def test_rails_of_the_file_are_known_by_name() -> None:
    known = Topology(
        HOSTS,
        rails=(TCP, FAST),
        racks=(Rack(hosts=(0,), uplinks=(None, TCP)), Rack(hosts=(1,))),
        own_rails=(OwnRails(host=1, rails=(FAST, TCP)),),
        interfaces=("a", "b"),
    )
    assert topology_with(known, places(("a", None), ("b", None))) == known
    second = topology_with(known, places(("b", None)))
    assert (second.rails, second.interfaces, second.racks[0].uplinks) == ((FAST,), ("b",), (TCP,))
    assert second.rails_of(1) == (TCP,)
    assert topology_with(known, places(("x", None), ("y", None))) == known
    unknown = topology_with(known, places(("c", None), ("a", None), ("b", None)))
    assert unknown.rails == (TCP, TCP, TCP)
    assert (unknown.own_rails, unknown.racks[0].uplinks) == ((), ())


def row(rail: int, megabytes: float, busy_s: float, *, is_up: bool = True) -> Traffic:
    return Traffic(peer=1, rail=rail, is_up=is_up, acknowledged_bytes=int(megabytes * 1e6), busy_s=busy_s)


@pytest.mark.parametrize(
    ("weights", "rows", "slow"),
    [
        ((1.0, 1.0), [row(0, 100, 2), row(1, 40, 2)], {1}),
        ((4.0, 1.0), [row(0, 100, 2), row(1, 25, 2)], set()),
        ((1.0, 4.0), [row(0, 100, 2), row(1, 100, 2)], {1}),
        ((1.0, 1.0), [row(0, 100, 2), row(1, 1, 0.5)], set()),
        ((1.0, 1.0), [row(0, 100, 2), row(1, 1, 9, is_up=False)], set()),
        ((1.0, 1.0), [], set()),
    ],
)
def test_slow_is_what_brings_less_than_half_its_share(
    weights: tuple[float, ...], rows: list[Traffic], slow: set[int]
) -> None:
    assert set(slow_rails(rows, weights)) == slow


def test_traffic_since() -> None:
    assert row(0, 5, 3).since(row(0, 2, 1)) == row(0, 3, 2)
    assert row(0, 5, 3).since(None) == row(0, 5, 3)
