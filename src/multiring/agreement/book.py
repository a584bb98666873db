"""What one rank knows of its group's operations: who has come or joined, what is decided, what it is yet to be told."""

from collections.abc import Iterable, Sequence

from multiring.agreement.decisions import Deadlock, Decision, Joined, Ready, Refused
from multiring.agreement.messages import Arrival, Last, Report
from multiring.agreement.pending import Pending


class Book:
    """The operations that are announced and not decided in the subtree of a rank, and who has joined.

    Places are bits: 1 the rank itself, 2 its first child with all that is below it, 4 the second, ...
    """

    def __init__(self, rank: int, children: Iterable[int]) -> None:
        self._rank = rank
        self._place = {child: 2 << number for number, child in enumerate(children)}
        self._everybody = (2 << len(self._place)) - 1
        self.pending: dict[str, Pending] = {}
        self.joined = 0  # places
        self._last: Last | None = None
        self._told_joined = False
        self.seen = 0  # decisions
        self._child_seen = dict.fromkeys(self._place, 0)  # as of its last report
        # By name, the number of the decision against it. What a child reported before it had that decision is part of
        # what was decided against.
        self._against: dict[str, int] = {}
        self._late: dict[str, list[Refused | Deadlock]] = {}  # decided before this rank came to them

    def check_in_step(self) -> None:
        """Raise ValueError where this rank has joined."""
        if self.joined & 1:
            raise ValueError(f"rank {self._rank} has joined, and can announce and join nothing until all have")

    def check_announcement(self, operations: Sequence[tuple[str, str]]) -> None:
        """Raise ValueError where this rank cannot announce these operations."""
        self.check_in_step()
        names = [name for name, _ in operations]
        if len(set(names)) < len(names):
            raise ValueError(f"a name is there twice: {names}")
        for name, terms in operations:
            if self._has_come(1, name):
                raise ValueError(f"rank {self._rank} has announced {name!r}, and it is not decided yet")
            # A pair of surrogates comes back from JSON as one character: another name. This raises a ValueError.
            f"{name}{terms}".encode()

    def late(self, name: str) -> Refused | Deadlock | None:
        """Return, once, what was decided against an operation before this rank came to it."""
        decisions = self._late.get(name)
        if decisions is None:
            return None
        decision = decisions.pop(0)
        if not decisions:
            del self._late[name]
        return decision

    def come(self, arrivals: Iterable[Arrival], place: int = 1) -> list[str]:
        """Note that the ranks of a place have come to operations; return their names."""
        names = []
        for arrival in arrivals:
            pending = self.pending.get(arrival.name)
            if pending is None:
                pending = self.pending[arrival.name] = Pending()
            pending.add(place, arrival)
            names.append(arrival.name)
        return names

    def join(self, last: Last, place: int = 1) -> list[str]:
        """Note that all ranks of a place have joined, `last` as the last; return the operations that this changes."""
        self.joined |= place
        # Of those that waited equally long whose joining was known last.
        if self._last is None or last.waited_us <= self._last.waited_us:
            self._last = last
        return list(self.pending)

    def check_report(self, child: int, report: Report) -> None:
        """Raise ValueError where a child cannot have sent this."""
        place = self._place[child]
        least = self._child_seen[child]
        if not least <= report.seen <= self.seen:
            raise ValueError(f"it has seen {report.seen} decisions, want {least} to {self.seen}")
        if self.joined & place and (report.arrivals or report.last is not None):
            raise ValueError("it goes on, though it has joined")
        names = [arrival.name for arrival in report.arrivals]
        if len(set(names)) < len(names) or any(self._has_come(place, name) for name, _ in self._current(report)):
            raise ValueError(f"it has come before to one of {names[:8]}")

    def take_report(self, child: int, report: Report) -> list[str]:
        """Note what a child reports; return the operations that this changes."""
        place = self._place[child]
        changed = self.come(self._current(report), place)
        self._child_seen[child] = report.seen
        if self._against:
            known_to_all = min(self._child_seen.values())
            self._against = {name: number for name, number in self._against.items() if number > known_to_all}
        return changed if report.last is None else self.join(report.last, place)

    def settled(self, changed: Iterable[str]) -> tuple[list[Arrival], Last | None]:
        """Return what the parent, or at the root the group, is to know, once.

        That is: the operations to which all have come or about which ranks differ; and where all have joined, the last.
        """
        found = []
        for name in changed:
            pending = self.pending[name]
            if not pending.is_told and pending.is_settled(self.joined, self._everybody):
                pending.is_told = True
                found.append(Arrival(name, tuple(pending.voices.values())))
        if self.joined != self._everybody or self._told_joined:
            return found, None
        self._told_joined = True
        return found, self._last

    def apply(self, decision: Decision) -> tuple[str, ...]:
        """Note a decision; return the operations that it ends."""
        self.seen += 1
        match decision:
            case Ready(name):
                self.pending.pop(name, None)
                return (name,)
            case Refused(name):
                self._end(name, decision)
                return (name,)
            case Deadlock(blocked, names):
                for name, ranks in names.items():
                    self._end(name, Deadlock(blocked, {name: ranks}))  # a note of it is about this one
                return tuple(names)
            case Joined():
                self.pending.clear()
                self._late.clear()
                self._against.clear()
                self.joined, self._last, self._told_joined = 0, None, False
        return ()

    def _end(self, name: str, decision: Refused | Deadlock) -> None:
        if not self._has_come(1, name) and not self.joined & 1:
            self._late.setdefault(name, []).append(decision)
        self.pending.pop(name, None)
        if self._place:
            self._against[name] = self.seen

    def _has_come(self, place: int, name: str) -> bool:
        return name in self.pending and bool(self.pending[name].come & place)

    def _current(self, report: Report) -> Sequence[Arrival]:
        """Return the arrivals that are not part of what has been decided against since they were reported."""
        if not self._against:
            return report.arrivals
        return [arrival for arrival in report.arrivals if report.seen >= self._against.get(arrival.name, 0)]
