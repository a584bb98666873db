"""The doctor's rules name exactly what was changed in healthy readings, and nothing just on the healthy side."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multiring._diagnosis.findings import FindingKind
from multiring._diagnosis.link_rules import unjudged_links
from multiring._diagnosis.readings import Absence, HostReading, Needs, PairReading, RailReading, Readings
from multiring._diagnosis.rounds import pairs_in_order, rounds_of
from multiring._diagnosis.rules import findings_of

NEEDS = Needs(memory_bytes=1 << 30, shm_bytes=1 << 28, files=1024)
GBIT = 125e6


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a fault is seeded: a host, another one, a rail; and its severity, 0 for just healthy to 1 for the worst.

    `is_ill` says on which side of the threshold the severity lies.
    """

    host: int
    other: int
    rail: int
    severity: float
    is_ill: bool

    def share(self) -> float:
        """Return a share of the median that this severity leaves."""
        return 0.79 - 0.6 * self.severity if self.is_ill else 0.81 + 0.19 * self.severity


@st.composite
def clusters(draw: st.DrawFn) -> Readings:
    """Return readings of a healthy job: hosts in racks, rails of different speeds, a little noise."""
    count, rails, racks = draw(st.integers(3, 9)), draw(st.integers(1, 3)), draw(st.integers(1, 2))
    racks = racks if count >= 4 else 1
    random = draw(st.randoms(use_true_random=False))
    speeds = [GBIT / 2**rail for rail in range(rails)]
    is_stated = draw(st.booleans())
    rack_of = tuple(host * racks // count for host in range(count))
    hosts = tuple(
        HostReading(
            name=f"h{host}",
            machine=f"m{host}",
            versions={"multiring": "0.9", "Python": "3.11.7", "numpy": "2.1.0", "torch": "2.9.0"},
            rails=tuple(
                RailReading(
                    interface=f"eth{rail}",
                    address=f"10.0.{rail}.{host}",
                    mtu=1500,
                    stated_bytes_per_s=speeds[rail] if is_stated else None,
                )
                for rail in range(rails)
            ),
            ranks=random.randint(1, 4),
            cores=4,
            machine_cores=8,
            memory_bytes=NEEDS.memory_bytes + random.randrange(1 << 34),
            shm_bytes=NEEDS.shm_bytes + random.randrange(1 << 34),
            files=NEEDS.files + random.randrange(1 << 20),
            clock_s=0.02 * random.random(),
            work_s=1e-3 * (1 + 0.05 * random.random()),
            others=0.5 * random.random(),
            gpus=("H100", "H100"),
            torch_cuda="12.8",
            driver_cuda="12.4",
            nccl="2.27.3",
        )
        for host in range(count)
    )
    between = 0.5  # racks share an uplink
    pairs = tuple(
        PairReading(
            source=one,
            target=other,
            rail=rail,
            bytes_per_s=speeds[rail]
            * (1.0 if rack_of[one] == rack_of[other] else between)
            * (1 - 0.03 * random.random()),
        )
        for one in range(count)
        for other in range(count)
        if one != other
        for rail in range(rails)
    )
    return Readings(hosts=hosts, pairs=pairs, racks=rack_of if racks > 1 else ())


@st.composite
def places(draw: st.DrawFn, readings: Readings) -> Place:
    hosts = draw(st.permutations(range(len(readings.hosts))))
    rails = len(readings.hosts[0].rails)
    return Place(
        host=hosts[0],
        other=hosts[1],
        rail=draw(st.integers(0, rails - 1)),
        severity=draw(st.floats(0.05, 1.0)),
        is_ill=draw(st.booleans()),
    )


def on_host(readings: Readings, host: int, **values: object) -> Readings:
    hosts = [replace(each, **values) if at == host else each for at, each in enumerate(readings.hosts)]  # type: ignore[arg-type]
    return replace(readings, hosts=tuple(hosts))


def on_rail(readings: Readings, place: Place, **values: object) -> Readings:
    host = readings.hosts[place.host]
    rails = [replace(each, **values) if at == place.rail else each for at, each in enumerate(host.rails)]  # type: ignore[arg-type]
    return on_host(readings, place.host, rails=tuple(rails))


def on_pairs(
    readings: Readings, is_of: Callable[[PairReading], bool], change: Callable[[PairReading], PairReading]
) -> Readings:
    return replace(readings, pairs=tuple(change(each) if is_of(each) else each for each in readings.pairs))


def slower(readings: Readings, is_of: Callable[[PairReading], bool], share: float) -> Readings:
    """Return readings in which some links have this share of the best rate of their kind."""
    racks = readings.racks or (0,) * len(readings.hosts)

    def is_within(pair: PairReading) -> bool:
        return racks[pair.source] == racks[pair.target]

    def change(pair: PairReading) -> PairReading:
        alike = sorted(
            each.bytes_per_s or 0.0
            for each in readings.pairs
            if each.rail == pair.rail and is_within(each) == is_within(pair)
        )
        return replace(pair, bytes_per_s=share * alike[len(alike) // 2])

    return on_pairs(readings, is_of, change)


Seeded = tuple[Readings, FindingKind, set[int]]  # the readings, the cause, and the hosts that must be named


def slow_interface(readings: Readings, place: Place) -> Seeded:
    found = slower(
        readings,
        lambda pair: pair.rail == place.rail and place.host in (pair.source, pair.target),
        0.75 - 0.6 * place.severity if place.is_ill else 0.86 + 0.1 * place.severity,
    )
    kind = FindingKind.SLOW_INTERFACE
    return found, kind, {place.host}


def slow_host(readings: Readings, place: Place) -> Seeded:
    return (
        on_host(readings, place.host, work_s=1.02e-3 / (place.share() if place.is_ill else 0.9)),
        FindingKind.SLOW_HOST,
        {place.host},
    )


def slow_link(readings: Readings, place: Place) -> Seeded:
    ends = {place.host, place.other}
    share = 0.75 - 0.6 * place.severity if place.is_ill else 0.86 + 0.1 * place.severity
    found = slower(readings, lambda pair: pair.rail == place.rail and {pair.source, pair.target} == ends, share)
    return found, FindingKind.SLOW_LINK, ends


def slow_rail(readings: Readings, place: Place) -> Seeded:
    hosts = tuple(
        replace(
            host,
            rails=tuple(replace(each, stated_bytes_per_s=GBIT / 2**at) for at, each in enumerate(host.rails)),
        )
        for host in readings.hosts
    )
    share = 0.75 - 0.6 * place.severity if place.is_ill else 0.9

    def change(pair: PairReading) -> PairReading:
        return replace(pair, bytes_per_s=share * (pair.bytes_per_s or 0.0))

    found = on_pairs(replace(readings, hosts=hosts), lambda pair: pair.rail == place.rail, change)
    return found, FindingKind.SLOW_RAIL, set()


def firewall(readings: Readings, place: Place) -> Seeded:
    ends = {place.host, place.other}
    found = on_pairs(
        readings,
        lambda pair: place.is_ill and pair.rail == place.rail and {pair.source, pair.target} == ends,
        lambda pair: replace(pair, refusal="timed out", bytes_per_s=None),
    )
    return found, FindingKind.FIREWALL, ends


def wrong_interface(readings: Readings, place: Place) -> Seeded:
    found = on_pairs(
        readings,
        lambda pair: place.is_ill and pair.rail == place.rail and place.host in (pair.source, pair.target),
        lambda pair: replace(pair, refusal="connection refused", bytes_per_s=None),
    )
    # Another interface, such as the loopback one, has another MTU; that is the same finding.
    return on_rail(found, place, mtu=65536 if place.is_ill else 1500), FindingKind.WRONG_INTERFACE, {place.host}


def clock(readings: Readings, place: Place) -> Seeded:
    skew_s = 0.071 + place.severity if place.is_ill else 0.029
    usual = sorted(host.clock_s or 0.0 for host in readings.hosts)[len(readings.hosts) // 2]
    sign = -1 if place.other % 2 else 1
    return on_host(readings, place.host, clock_s=usual + sign * skew_s), FindingKind.CLOCK, {place.host}


def version(readings: Readings, place: Place) -> Seeded:
    package = ["multiring", "Python", "numpy", "torch"][place.other % 4]
    versions = dict(readings.hosts[place.host].versions)
    if place.is_ill:
        versions[package] = "0.0.1"
    return on_host(readings, place.host, versions=versions), FindingKind.VERSION, {place.host}


def mtu(readings: Readings, place: Place) -> Seeded:
    return on_rail(readings, place, mtu=1499 if place.is_ill else 1500), FindingKind.MTU, {place.host}


def below(name: str, kind: FindingKind, need: int) -> Callable[[Readings, Place], Seeded]:
    def seed(readings: Readings, place: Place) -> Seeded:
        has = int(need * (1 - 0.9 * place.severity)) - 1 if place.is_ill else need
        return on_host(readings, place.host, **{name: has}), kind, {place.host}

    return seed


def oversubscribed(readings: Readings, place: Place) -> Seeded:
    return on_host(readings, place.host, ranks=5 if place.is_ill else 4), FindingKind.OVERSUBSCRIBED, {place.host}


def limited(readings: Readings, place: Place) -> Seeded:
    quota = 2.9 if place.is_ill else 3.0
    return on_host(readings, place.host, ranks=3, quota=quota), FindingKind.OVERSUBSCRIBED, {place.host}


def throttled(readings: Readings, place: Place) -> Seeded:
    share = 0.06 + 0.9 * place.severity if place.is_ill else 0.04
    return on_host(readings, place.host, throttled=share), FindingKind.THROTTLED, {place.host}


def busy(readings: Readings, place: Place) -> Seeded:
    return on_host(readings, place.host, others=2.1 if place.is_ill else 1.9), FindingKind.BUSY, {place.host}


def gpu(readings: Readings, place: Place) -> Seeded:
    gpus = [("H100",), ("H100", "A100"), ()][place.other % 3] if place.is_ill else ("H100", "H100")
    return on_host(readings, place.host, gpus=gpus), FindingKind.GPU, {place.host}


def old_driver(readings: Readings, place: Place) -> Seeded:
    return on_host(readings, place.host, driver_cuda="11.8" if place.is_ill else "12.0"), FindingKind.GPU, {place.host}


def cpu_torch(readings: Readings, place: Place) -> Seeded:
    return on_host(readings, place.host, torch_cuda="" if place.is_ill else "12.6"), FindingKind.GPU, {place.host}


def nccl(readings: Readings, place: Place) -> Seeded:
    version = ["", "2.20.5"][place.other % 2] if place.is_ill else "2.27.3"
    return on_host(readings, place.host, nccl=version), FindingKind.NCCL, {place.host}


SEEDS = [
    slow_interface, slow_host, slow_link, slow_rail, firewall, wrong_interface, clock, version, mtu,
    below("memory_bytes", FindingKind.MEMORY, NEEDS.memory_bytes),
    below("shm_bytes", FindingKind.SHARED_MEMORY, NEEDS.shm_bytes),
    below("files", FindingKind.FILES, NEEDS.files),
    oversubscribed, limited, throttled, busy, gpu, old_driver, cpu_torch, nccl,
]  # fmt: skip


@given(clusters())
@settings(max_examples=60, deadline=None)
def test_healthy_readings_give_no_finding(readings: Readings) -> None:
    assert findings_of(readings, NEEDS) == []


@pytest.mark.parametrize("seed", SEEDS)
@given(st.data())
@settings(max_examples=20, deadline=None)
def test_exactly_the_seeded_fault_is_named(seed: Callable[[Readings, Place], Seeded], data: st.DataObject) -> None:
    healthy = data.draw(clusters())
    place = data.draw(places(healthy))
    readings, kind, hosts = seed(healthy, place)
    found = findings_of(readings, NEEDS)
    if not place.is_ill:
        assert found == []
        return
    only_rail = len(readings.hosts[0].rails) == 1
    assert [each.kind for each in found] == [kind], (only_rail, found)
    named = set(found[0].where.split(", "))
    assert not hosts or named == {readings.hosts[host].name for host in hosts}
    assert found[0].todo


@given(clusters(), st.data())
@settings(max_examples=20, deadline=None)
def test_a_host_whose_interfaces_are_all_slow_is_named_once(readings: Readings, data: st.DataObject) -> None:
    host = data.draw(st.integers(0, len(readings.hosts) - 1))
    rails = len(readings.hosts[0].rails)
    slow = slower(readings, lambda pair: host in (pair.source, pair.target), 0.5)
    (found,) = findings_of(slow, NEEDS)
    assert found.kind is (FindingKind.SLOW_HOST if rails > 1 else FindingKind.SLOW_INTERFACE)
    assert found.where == readings.hosts[host].name


@given(clusters(), st.data())
@settings(max_examples=20, deadline=None)
def test_a_slow_host_beside_other_programs_is_busy(readings: Readings, data: st.DataObject) -> None:
    host = data.draw(st.integers(0, len(readings.hosts) - 1))
    slow = on_host(readings, host, work_s=2e-3)
    assert [each.kind for each in findings_of(slow, NEEDS)] == [FindingKind.SLOW_HOST]
    busy = on_host(slow, host, others=2.1)
    assert [each.kind for each in findings_of(busy, NEEDS)] == [FindingKind.BUSY]


@given(clusters(), st.data())
@settings(max_examples=20, deadline=None)
def test_a_host_that_only_sends_slowly_is_named(readings: Readings, data: st.DataObject) -> None:
    host = data.draw(st.integers(0, len(readings.hosts) - 1))
    (found,) = findings_of(slower(readings, lambda pair: pair.source == host and pair.rail == 0, 0.6), NEEDS)[:1]
    assert found.where == readings.hosts[host].name
    assert found.kind in (FindingKind.SLOW_INTERFACE, FindingKind.SLOW_HOST)


@given(clusters(), st.data())
@settings(max_examples=20, deadline=None)
def test_a_rate_that_varies_is_not_judged_and_that_is_said(readings: Readings, data: st.DataObject) -> None:
    place = data.draw(places(readings))
    ends = {place.host, place.other}

    def is_link(pair: PairReading) -> bool:
        return pair.rail == place.rail and {pair.source, pair.target} == ends

    slow = slower(readings, is_link, 0.6)
    assert [each.kind for each in findings_of(slow, NEEDS)] == [FindingKind.SLOW_LINK]
    varying = on_pairs(slow, is_link, lambda pair: replace(pair, variation=0.3))
    assert findings_of(varying, NEEDS) == []
    said = unjudged_links(varying)
    names = {readings.hosts[host].name for host in ends}
    assert all(all(name in each for name in names) for each in said)
    is_alone = sum(not is_link(pair) and pair.rail == place.rail for pair in readings.pairs) == 0
    assert said or is_alone or readings.racks
    assert unjudged_links(slow) == unjudged_links(readings) == []


def two_hosts(**values: object) -> Readings:
    hosts = tuple(HostReading(name=name, machine=name, **values) for name in "ab")  # type: ignore[arg-type]
    return Readings(hosts=hosts)


def test_two_hosts_that_differ_are_both_named() -> None:
    readings = on_host(two_hosts(clock_s=0.0, versions={"numpy": "2.0"}), 1, clock_s=0.06, versions={"numpy": "1.0"})
    found = findings_of(readings, NEEDS)
    assert [(each.kind.value, each.where) for each in found] == [("version", "a, b"), ("clock", "a, b")]
    assert "2.0 on a, 1.0 on b" in found[0].found
    assert "differ by 60 ms" in found[1].found


@pytest.mark.parametrize(("stated", "kinds"), [(None, []), (GBIT, [FindingKind.SLOW_LINK])])
def test_two_directions_are_compared_if_a_bandwidth_is_stated(stated: float | None, kinds: list[FindingKind]) -> None:
    rails = (RailReading(interface="eth0", address="10.0.0.1", stated_bytes_per_s=stated),)
    pairs = tuple(
        PairReading(source=one, target=1 - one, bytes_per_s=rate) for one, rate in ((0, GBIT), (1, 0.7 * GBIT))
    )
    found = findings_of(replace(two_hosts(rails=rails), pairs=pairs), NEEDS)
    assert [each.kind for each in found] == kinds


def test_a_slow_link_is_likely_if_the_cores_are_busy() -> None:
    rails = (RailReading(interface="eth0", address="10.0.0.1"),)
    rates = {(one, other): GBIT for one in range(4) for other in range(4) if one != other} | {(0, 1): 0.5 * GBIT}
    pairs = tuple(PairReading(source=one, target=other, bytes_per_s=rate) for (one, other), rate in rates.items())
    for others, is_certain in ((0.0, True), (1.5, False)):
        hosts = tuple(
            HostReading(name=name, machine=name, machine_cores=2, others=others, rails=rails) for name in "abcd"
        )
        found = findings_of(Readings(hosts=hosts, pairs=pairs), NEEDS)
        assert [each.is_certain for each in found if each.kind is FindingKind.SLOW_LINK] == [is_certain]


def test_two_hosts_that_cannot_connect_are_a_pair() -> None:
    rails = (RailReading(interface="eth0", address="10.0.0.1"),)
    pairs = (PairReading(source=0, target=1, refusal="timed out"), PairReading(source=1, target=0, refusal="timed out"))
    (found,) = findings_of(replace(two_hosts(rails=rails), pairs=pairs), NEEDS)
    assert (found.kind, found.where) == (FindingKind.FIREWALL, "a, b")


def test_a_silent_rank_and_a_foreign_mpi_are_findings() -> None:
    absent = (Absence(who="rank 3", why="no connection to rank 0 within 15 s"),)
    found = findings_of(replace(two_hosts(), absent=absent, launcher_fault="mpi4py uses MPICH"), NEEDS)
    assert [(each.kind.value, each.where, each.is_certain) for each in found] == [
        ("mpi", "all ranks", True),
        ("silent", "rank 3", False),
    ]


def test_virtual_hosts_of_one_busy_machine_are_named_together() -> None:
    hosts = tuple(HostReading(name=name, machine="m", machine_cores=2, others=1.5) for name in "abc")
    (found,) = findings_of(Readings(hosts=hosts), NEEDS)
    assert (found.kind, found.where) == (FindingKind.BUSY, "a, b, c")


@given(st.integers(2, 40), st.integers(1, 8), st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_rounds_have_each_pair_once_and_share_nothing(hosts: int, most: int, racks: int) -> None:
    pairs = pairs_in_order(hosts, most)
    assert len(set(pairs)) == len(pairs)
    assert all(0 <= one < other < hosts for one, other in pairs)
    assert {host for pair in pairs for host in pair} == set(range(hosts))
    if hosts - 1 <= most:
        assert len(pairs) == hosts * (hosts - 1) // 2
    rack_of = [host % racks for host in range(hosts)]
    rounds = rounds_of(pairs, rack_of)
    assert sorted(pair for each in rounds for pair in each) == sorted(pairs)
    for each in rounds:
        ends = [host for pair in each for host in pair]
        uplinks = [rack_of[host] for pair in each for host in pair if rack_of[pair[0]] != rack_of[pair[1]]]
        assert len(set(ends)) == len(ends)
        assert len(set(uplinks)) == len(uplinks)


def test_full_rounds_are_few() -> None:
    assert len(rounds_of(pairs_in_order(8, 32), ())) == 7
    assert len(rounds_of(pairs_in_order(7, 32), ())) == 7
