"""Take all readings of a job: rank 0 asks one rank of each host, in turns of bounded time."""

import secrets
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from multiring._diagnosis.checker import reading_told
from multiring._diagnosis.rank_links import ArrivedRank, RankLinks
from multiring._diagnosis.readings import Absence, HostReading, PairReading, Readings
from multiring._diagnosis.rounds import Pair, pairs_in_order, rounds_of
from multiring._runtime.bootstrap.handshake import Message
from multiring._topology import Topology

_LOOK_S, _WORK_S, _REACH_S = 15.0, 10.0, 20.0
_PINGS, _PINGS_S = 24, 2.0
_MOST_REACHED = 64  # hosts to which one host connects
_MOST_MEASURED = 32  # hosts to which one host measures the rate
_DRAIN_S, _RATE_S, _ANSWER_S = 0.2, 0.6, 5.0
_RATES_S = 15.0  # all rates; with many hosts and rails, some pairs are left out
# A link below this share of the fastest is measured again, as long as there is time: other work makes a rate smaller,
# and hardly ever greater (docs/decisions/0141-doctor.md).
_CLEAR = 0.95
_MOST_AGAIN = 6
_PAUSE_S = 0.3  # before work is measured a third time; twice that before the fourth


class Examination:
    """The examination of a job by rank 0.

    Args:
        links: the connections to the ranks.
        size: the number of ranks.
        topology: the topology file's contents, for the racks; None without one.
        patience_s: how long to wait for all ranks.
        absent: hosts that are known not to answer.
    """

    def __init__(
        self,
        links: RankLinks,
        size: int,
        topology: Topology | None,
        patience_s: float,
        absent: Sequence[Absence] = (),
    ) -> None:
        self._links = links
        self._size = size
        self._topology = topology
        self._patience_s = patience_s
        self._absent = list(absent)
        self._unread: list[str] = []
        self._hosts: dict[int, HostReading] = {}  # by the rank of the host's checker
        self._racks: tuple[int, ...] = ()
        self._rates_of: dict[tuple[int, int, int], list[float]] = {}  # by source, target and rail

    def run(self, release: Callable[[], None] = lambda: None) -> Readings:
        """Take all readings.

        Args:
            release: called when no more ranks are awaited.
        """
        arrivals = self._links.arrive(self._patience_s)
        release()
        self._look(arrivals)
        self._clocks()
        for rank, seconds in self._ask({rank: {"do": "work"} for rank in self._hosts}, _WORK_S, "computed").items():
            self._hosts[rank] = replace(self._hosts[rank], work_s=seconds)
        self._again_if_slow()
        ranks = list(self._hosts)
        pairs = self._reach(ranks)
        pairs = self._rates(ranks, pairs)
        self._meanwhile()
        kept = [rank for rank in ranks if rank in self._hosts]
        return Readings(
            hosts=tuple(self._hosts[rank] for rank in kept),
            pairs=tuple(_renumbered(pairs, ranks, kept)),
            absent=tuple(self._absent),
            racks=tuple(self._racks[ranks.index(rank)] for rank in kept) if self._racks else (),
            unread=tuple(self._unread),
        )

    def _look(self, arrivals: Sequence[ArrivedRank]) -> None:
        missing = sorted(set(range(self._size)) - {each.rank for each in arrivals})
        if missing:
            who = f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
            why = f"no connection to rank 0 within {self._patience_s:g} s"
            self._absent.append(Absence(who=who, why=why))
        by_host: dict[str, list[ArrivedRank]] = {}
        for each in arrivals:
            by_host.setdefault(each.host, []).append(each)
        checkers = {ranks[0].rank: ranks for ranks in by_host.values()}
        self._links.dismiss({each.rank for each in arrivals} - checkers.keys())
        token = secrets.token_hex(16)
        questions: dict[int, Message] = {
            rank: {"do": "look", "with": {"number": rank, "token": token}} for rank in checkers
        }
        told = self._links.ask(questions, _LOOK_S)
        for rank, ranks in checkers.items():
            if rank not in told:
                self._lose(rank, f"the host of rank {rank}", "its reading")
                continue
            cpus = frozenset().union(*(each.cpus for each in ranks))
            planned = ranks[0].planned
            count = len(ranks) if planned is None else planned
            self._hosts[rank] = replace(reading_told(told[rank]), ranks=count, cores=len(cpus))
        self._hosts = _with_different_names(self._hosts)
        self._racks = _racks_of(self._topology, [host.name for host in self._hosts.values()])

    def _ask(self, questions: dict[int, Message], within_s: float, what: str) -> dict[int, Any]:
        """Ask the checkers; a host that does not answer is absent from now on."""
        answers = self._links.ask(questions, within_s)
        for rank in questions.keys() - answers.keys():
            self._lose(rank, self._hosts.pop(rank).name, f"what it {what}")
        return answers

    def _lose(self, rank: int, name: str, what: str) -> None:
        self._absent.append(Absence(who=name, why=f"it stopped answering: {what} did not arrive in time"))
        self._links.dismiss({rank})

    def _clocks(self) -> None:
        for rank in list(self._hosts):
            best: tuple[float, float] | None = None  # round trip, offset
            until = time.monotonic() + _PINGS_S
            for _ in range(_PINGS):
                before_s, began = time.time(), time.monotonic()
                answer = self._links.ask({rank: {"do": "clock"}}, max(0.1, until - began))
                trip_s = time.monotonic() - began
                if rank in answer and (best is None or trip_s < best[0]):
                    best = trip_s, answer[rank] - before_s - trip_s / 2
                if time.monotonic() > until:
                    break
            if best is not None:
                self._hosts[rank] = replace(self._hosts[rank], clock_s=best[1], clock_error_s=best[0] / 2)

    def _again_if_slow(self) -> None:
        """Let hosts that computed slowly compute again, alone: other programs may have taken caches and clock speed."""
        for number in range(3):
            time.sleep(_PAUSE_S * number)  # what the other programs do may be short
            times = {rank: host.work_s for rank, host in self._hosts.items() if host.work_s}
            if len(times) < 2:
                return
            slow = [rank for rank, seconds in times.items() if seconds > statistics.median_low(times.values()) / 0.9]
            for rank in slow[:4]:
                for answer in self._ask({rank: {"do": "work"}}, _WORK_S, "computed").values():
                    self._hosts[rank] = replace(self._hosts[rank], work_s=min(times[rank], answer))

    def _reach(self, ranks: list[int]) -> list[PairReading]:
        tries: dict[int, list[tuple[int, int, str, int]]] = {rank: [] for rank in self._hosts}
        for one, other in pairs_in_order(len(ranks), _MOST_REACHED):
            for source, target in ((one, other), (other, one)):
                own, there = (self._hosts[ranks[end]] for end in (source, target))
                for rail in range(min(len(own.rails), len(there.rails))):
                    end = there.rails[rail]
                    tries[ranks[source]].append((ranks[target], rail, end.address, end.port))
        questions: dict[int, Message] = {
            rank: {"do": "reach", "with": {"ends": ends}} for rank, ends in tries.items() if ends
        }
        answers = self._ask(questions, _REACH_S, "could reach")
        return [
            PairReading(source=ranks.index(rank), target=ranks.index(target), rail=rail, refusal=refusal)
            for rank, refusals in answers.items()
            for (target, rail, _, _), refusal in zip(tries[rank], refusals, strict=True)
        ]

    # ---- rates ----

    def _rates(self, ranks: list[int], pairs: list[PairReading]) -> list[PairReading]:
        """Return the readings with the best rate of each link that was measured."""
        by_ends = {(each.source, each.target, each.rail): each for each in pairs}
        rails = sorted({each.rail for each in pairs})
        until = time.monotonic() + _RATES_S
        todo = pairs_in_order(len(ranks), _MOST_MEASURED)
        left_out = False
        for rail in rails:
            own_until = time.monotonic() + (until - time.monotonic()) / max(1, len(rails) - rails.index(rail))
            wanted = [pair for pair in todo if _is_open(by_ends, pair, rail)]
            for again in range(_MOST_AGAIN):
                for together in rounds_of(wanted, self._racks):
                    if time.monotonic() > own_until:
                        left_out |= not again
                        break
                    self._measure(ranks, together, rail, by_ends)
                wanted = [pair for pair in wanted if self._is_unclear(by_ends, pair, rail)]
        if left_out:
            self._unread.append(f"not all links were timed within {_RATES_S:g} s")
        return list(by_ends.values())

    def _measure(
        self, ranks: list[int], together: list[Pair], rail: int, by_ends: dict[tuple[int, int, int], PairReading]
    ) -> None:
        """Measure pairs at once, both directions of a pair at once."""
        questions: dict[int, Message] = {}
        ends: dict[int, tuple[int, int, int]] = {}
        for one, other in together:
            for source, target in ((one, other), (other, one)):
                own, there = self._hosts.get(ranks[source]), self._hosts.get(ranks[target])
                if own is None or there is None or by_ends[source, target, rail].refusal:
                    continue
                place = {"host": ranks[target], "rail": rail, "address": there.rails[rail].address}
                place |= {"port": there.rails[rail].port, "seconds": (_DRAIN_S, _RATE_S)}
                questions[ranks[source]] = {"do": "rate", "with": place}
                ends[ranks[source]] = source, target, rail
        answers = self._ask(questions, _DRAIN_S + _RATE_S + _ANSWER_S, "measured")
        for rank, rate in answers.items():
            reading = by_ends[ends[rank]]
            if rate is not None:
                rates = self._rates_of.setdefault(ends[rank], [])
                rates.append(rate)
                variation = 1 - statistics.median(rates) / max(rates)
                by_ends[ends[rank]] = replace(reading, bytes_per_s=max(rates), variation=variation)

    def _is_unclear(self, by_ends: dict[tuple[int, int, int], PairReading], pair: Pair, rail: int) -> bool:
        """Return whether a pair is so much slower than the fastest of its kind that it must be measured again."""
        is_within = self._is_within(pair)
        rates = [
            each.bytes_per_s
            for each in by_ends.values()
            if each.rail == rail and each.bytes_per_s and self._is_within((each.source, each.target)) == is_within
        ]
        own = [by_ends[source, target, rail].bytes_per_s or 0.0 for source, target in (pair, pair[::-1])]
        return bool(rates) and min(own) < _CLEAR * max(rates)

    def _is_within(self, pair: Pair) -> bool:
        return not self._racks or self._racks[pair[0]] == self._racks[pair[1]]

    # ---- the end ----

    def _meanwhile(self) -> None:
        told = self._ask({rank: {"do": "end"} for rank in self._hosts}, _ANSWER_S, "measured meanwhile")
        by_machine: dict[str, float] = {}
        for rank, found in told.items():
            machine = self._hosts[rank].machine
            by_machine[machine] = by_machine.get(machine, 0.0) + found["own_s"]
        for rank, found in told.items():
            host = self._hosts[rank]
            others = max(0.0, found["worked_s"] - by_machine[host.machine]) / found["passed_s"]
            self._hosts[rank] = replace(host, others=others, throttled=found["throttled"], heat=int(found["heat"]))


def _is_open(by_ends: dict[tuple[int, int, int], PairReading], pair: Pair, rail: int) -> bool:
    one, other = by_ends.get((*pair, rail)), by_ends.get((*pair[::-1], rail))
    return one is not None and other is not None and not (one.refusal and other.refusal)


def _renumbered(pairs: list[PairReading], ranks: list[int], kept: list[int]) -> list[PairReading]:
    """Return the pairs between hosts that stayed, numbered by their places among these."""
    places = {ranks.index(rank): place for place, rank in enumerate(kept)}
    return [
        replace(each, source=places[each.source], target=places[each.target])
        for each in pairs
        if each.source in places and each.target in places
    ]


def _with_different_names(hosts: dict[int, HostReading]) -> dict[int, HostReading]:
    names = [host.name for host in hosts.values()]
    return {
        rank: host if names.count(host.name) == 1 else replace(host, name=f"{host.name} (rank {rank})")
        for rank, host in hosts.items()
    }


def _racks_of(topology: Topology | None, names: Sequence[str]) -> tuple[int, ...]:
    """Return the rack of each host by its name; () if the topology does not tell it of each."""
    if topology is None or not topology.racks or not topology.names:
        return ()
    index = {name: at for at, name in enumerate(topology.names)}
    known = [index.get(name, index.get(name.partition(".")[0])) for name in names]
    rack_of = topology.rack_of()
    return tuple(rack_of[at] for at in known if at is not None) if None not in known else ()
