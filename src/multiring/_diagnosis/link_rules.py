"""The rules for links: which hosts cannot reach each other, and what is slower than the median.

A rail that is slow on one host is that host's interface. If all rails of a host are slow, the host is. A link between
two hosts is slow if neither host's interface explains it, and a rail if the median host's is below its stated speed.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from multiring._diagnosis.findings import FindingKind, HealthFinding, odd_ones
from multiring._diagnosis.readings import HostReading, PairReading, Readings

SLOW = 0.8  # a share of the median, or of the stated bandwidth
# A link that is slow gives nearly the same rate each time. On busy cores, links without a limit gave best rates of 77 %
# of each other, and medians far below; links with a limit gave medians of 0.92 to 1 of their best rate.
_STEADY = 0.12
BUSY = 0.25  # a share of the machine's CPUs; other programs that use more are a finding
Ends = tuple[int, int]  # source, target


def is_busy(host: HostReading) -> bool:
    """Return whether other programs used so many of a machine's CPUs that this is a finding."""
    return host.others is not None and host.others > BUSY * host.machine_cores


def link_findings(readings: Readings) -> list[HealthFinding]:
    """Return what is wrong with the interfaces and links."""
    found = [*_unusable(readings)]
    rails = range(max((len(host.rails) for host in readings.hosts), default=0))
    slow = {rail: _slow_hosts(readings, rail) for rail in rails}
    everywhere = set.intersection(*map(set, slow.values())) if len(rails) > 1 else set()
    for host in sorted(everywhere):
        worst = min(slow[rail][host] for rail in rails)
        found.append(
            HealthFinding(
                kind=FindingKind.SLOW_HOST,
                where=readings.hosts[host].name,
                found=f"all of its interfaces are slow, down to {worst:.0%} of the median host's rate",
                todo="compare the host's network settings, slots and cables with another host's (ethtool, lspci)",
            )
        )
    for rail in rails:
        found += [
            HealthFinding(
                kind=FindingKind.SLOW_INTERFACE,
                where=readings.hosts[host].name,
                found=f"{_interface(readings, rail)} carries {share:.0%} of the median host's rate",
                todo="check the interface's cable, port and negotiated speed (ethtool)",
            )
            for host, share in sorted(slow[rail].items())
            if host not in everywhere
        ]
        found += _slow_links(readings, rail, set(slow[rail]))
        found += _slow_rail(readings, rail)
    # Busy cores limit links that have no limit themselves; a stated bandwidth shows that the link has one.
    is_sure = all(_is_stated(readings, rail) for rail in rails) or not any(map(is_busy, readings.hosts))
    slow_kinds = (FindingKind.SLOW_INTERFACE, FindingKind.SLOW_LINK, FindingKind.SLOW_HOST)
    return [
        replace(each, is_certain=is_sure and each.is_certain) if each.kind in slow_kinds else each for each in found
    ]


# ---- connections ----


def _unusable(readings: Readings) -> Iterator[HealthFinding]:
    """Name the hosts without a usable interface, and pairs of hosts that cannot connect."""
    for host in readings.hosts:
        if host.rails_fault:
            yield HealthFinding(
                kind=FindingKind.WRONG_INTERFACE,
                where=host.name,
                found=host.rails_fault,
                todo="set MULTIRING_INTERFACE or MULTIRING_RAILS to interfaces that every host has",
            )
    counts = {host.name: str(len(host.rails)) for host in readings.hosts if not host.rails_fault}
    where, told = odd_ones(counts)
    if where:
        yield HealthFinding(
            kind=FindingKind.WRONG_INTERFACE,
            where=where,
            found=f"the number of interfaces for the job is {told}",
            todo="name equally many interfaces on all hosts in MULTIRING_RAILS",
        )
    for rail in sorted({pair.rail for pair in readings.pairs}):
        tried = [pair for pair in readings.pairs if pair.rail == rail]
        cut_off = _cut_off(tried)
        for lone, why in sorted(cut_off.items()):
            yield HealthFinding(
                kind=FindingKind.WRONG_INTERFACE,
                where=readings.hosts[lone].name,
                found=f"no host connects by {_interface(readings, rail, lone)} "
                f"({readings.hosts[lone].rails[rail].address}): {why}",
                todo="name an interface of the job's network in MULTIRING_INTERFACE or MULTIRING_RAILS on this host, "
                "and check that it is up",
            )
        refused: dict[Ends, str] = {}
        for pair in tried:
            ends = min(pair.source, pair.target), max(pair.source, pair.target)
            if pair.refusal and not set(ends) & set(cut_off):
                refused.setdefault(ends, pair.refusal)
        for (one, other), why in sorted(refused.items()):
            names = f"{readings.hosts[one].name}, {readings.hosts[other].name}"
            yield HealthFinding(
                kind=FindingKind.FIREWALL,
                where=names,
                found=f"they cannot connect by {_interface(readings, rail, one)}: {why}",
                todo="open the ports of MULTIRING_PORTS between the two hosts in both directions",
            )


def unusable_rails(readings: Readings) -> set[tuple[int, int]]:
    """Return the hosts and rails by which no connection was made, although other hosts connected by the rail."""
    return {
        (host, rail)
        for rail in {pair.rail for pair in readings.pairs}
        for host in _cut_off([pair for pair in readings.pairs if pair.rail == rail])
    }


def _cut_off(tried: list[PairReading]) -> dict[int, str]:
    """Return the hosts that neither reach another host nor are reached, with the reason, if others do reach each other.

    Two hosts that cannot reach each other are a pair: neither is the cause.
    """
    hosts = {end for pair in tried for end in (pair.source, pair.target)}
    if len(hosts) < 3:
        return {}
    found = {}
    for host in hosts:
        own = [pair for pair in tried if host in (pair.source, pair.target)]
        if own and all(pair.refusal for pair in own):
            found[host] = own[0].refusal
    return found if len(hosts) - len(found) >= 2 else {}


# ---- rates ----


def _slow_hosts(readings: Readings, rail: int) -> dict[int, float]:
    """Return the hosts whose best rate on a rail is below the median, each with its share of the median.

    A rate between racks may be that of an uplink, so rates within a rack and rates between racks are compared apart. A
    host is slow if it is slow in each comparison that it takes part in. Both directions of a link count, the slower one
    decides.
    """
    shares: dict[int, float] = {}
    unsteady = _unsteady_hosts(readings, rail)
    for is_sender in (True, False):
        by_class: dict[int, list[float]] = {}
        for rates in _by_class(readings, rail).values():
            best: dict[int, float] = {}
            for ends, rate in rates.items():
                host = ends[0 if is_sender else 1]
                best[host] = max(best.get(host, 0.0), rate)
            usual = _upper_median(list(best.values()))
            if len(best) > 2:
                for host, rate in best.items():
                    by_class.setdefault(host, []).append(rate / usual if host not in unsteady else 1.0)
        for host, found in by_class.items():
            shares[host] = min(shares.get(host, 1.0), max(found))
    return {host: share for host, share in shares.items() if share < SLOW}


def _is_stated(readings: Readings, rail: int) -> bool:
    """Return whether the bandwidth of a rail is stated on every host."""
    return all(rail < len(host.rails) and host.rails[rail].stated_bytes_per_s is not None for host in readings.hosts)


def _unsteady_hosts(readings: Readings, rail: int) -> set[int]:
    """Return the hosts of which most measurements on a rail vary too much to be compared."""
    found = set()
    for host in range(len(readings.hosts)):
        own = [pair for pair in readings.pairs if pair.rail == rail and host in (pair.source, pair.target)]
        if 2 * sum(pair.variation > _STEADY for pair in own) > len(own):
            found.add(host)
    return found


def unjudged_links(readings: Readings) -> list[str]:
    """Return sentences about links that were slow, but whose rate varied so much that they cannot be judged."""
    found = []
    for rail in sorted({pair.rail for pair in readings.pairs}):
        variation = {(pair.source, pair.target): pair.variation for pair in readings.pairs if pair.rail == rail}
        for rates in _by_class(readings, rail).values():
            usual = _upper_median(list(rates.values()))
            found += [
                f"{_interface(readings, rail, one)}, {readings.hosts[one].name} to {readings.hosts[other].name}: the "
                "rate varied too much to be judged; check again when the cores are idle"
                for (one, other), rate in rates.items()
                if rate < SLOW * usual and variation[one, other] > _STEADY
            ]
    return found


def _slow_links(readings: Readings, rail: int, slow: set[int]) -> Iterator[HealthFinding]:
    """Name the pairs whose rate is below the median, and that no slow interface explains."""
    found: dict[Ends, float] = {}
    unsteady = {(pair.source, pair.target) for pair in readings.pairs if pair.rail == rail and pair.variation > _STEADY}
    by_class = _by_class(readings, rail)
    if len(readings.hosts) == 2 and not _is_stated(readings, rail):
        return  # there is no median: on busy cores, the two directions of a link without a limit differ
    usual_of = {is_within: _upper_median(list(rates.values())) for is_within, rates in by_class.items()}
    for is_within, rates in by_class.items():
        # The only link within a rack is compared with those between racks, which are no faster.
        usual = max(usual_of.values()) if is_within else usual_of[is_within]
        for ends, rate in rates.items():
            if slow.isdisjoint(ends) and rate < SLOW * usual and ends not in unsteady:
                one, other = sorted(ends)
                found[one, other] = min(found.get((one, other), 1.0), rate / usual)
    for (one, other), share in sorted(found.items()):
        yield HealthFinding(
            kind=FindingKind.SLOW_LINK,
            where=f"{readings.hosts[one].name}, {readings.hosts[other].name}",
            found=f"{_interface(readings, rail, one)} carries {share:.0%} of the median rate between them",
            todo="check the switches and cables between the two hosts; other hosts reach both at full rate",
        )


def _slow_rail(readings: Readings, rail: int) -> Iterator[HealthFinding]:
    """Name a rail whose median host is below the stated bandwidth."""
    best: dict[int, tuple[float, float]] = {}
    for pair in readings.pairs:
        rails = readings.hosts[pair.source].rails
        if pair.rail != rail or pair.bytes_per_s is None or rail >= len(rails) or pair.variation > _STEADY:
            continue
        stated = rails[rail].stated_bytes_per_s
        if stated is not None:
            best[pair.source] = max(best.get(pair.source, (0.0, stated)), (pair.bytes_per_s, stated))
    shares = [rate / stated for rate, stated in best.values()]
    if shares and (usual := _upper_median(shares)) < SLOW:
        stated = next(iter(best.values()))[1]
        yield HealthFinding(
            kind=FindingKind.SLOW_RAIL,
            where="all hosts",
            found=f"{_interface(readings, rail)} carries {usual:.0%} of the stated {stated * 8e-6:.4g} Mbit/s on the "
            "median host",
            todo="check the rail's switch, or correct the bandwidth in the topology file or MULTIRING_RAILS",
        )


def _by_class(readings: Readings, rail: int) -> Mapping[bool, dict[Ends, float]]:
    """Return the rates on a rail by ends: within racks (True), and between racks (False)."""
    found: dict[bool, dict[Ends, float]] = {}
    stated = [host.rails[rail].stated_bytes_per_s for host in readings.hosts if rail < len(host.rails)]
    are_stated = len(stated) == len(readings.hosts) and None not in stated and len(set(stated)) > 1
    for pair in readings.pairs:
        if pair.rail == rail and pair.bytes_per_s is not None:
            racks = readings.racks
            is_within = not racks or racks[pair.source] == racks[pair.target]
            # Hosts that are meant to differ are compared by the share that they reach.
            of = min(stated[pair.source] or 1.0, stated[pair.target] or 1.0) if are_stated else 1.0
            found.setdefault(is_within, {})[pair.source, pair.target] = pair.bytes_per_s / of
    return found


def _upper_median(values: list[float]) -> float:
    """Return the middle value; of an even number, the upper one of the two, so that half of the hosts may be slow."""
    return sorted(values)[len(values) // 2]


def _interface(readings: Readings, rail: int, host: int = 0) -> str:
    rails = readings.hosts[host].rails
    return rails[rail].interface if rail < len(rails) else f"rail {rail}"
