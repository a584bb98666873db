"""One rank's record of its group's operations: arrivals, joins and decisions."""

from collections.abc import Iterable, Sequence

from multiring._agreement.decisions import Deadlock, Decision, Joined, Ready, Refused
from multiring._agreement.messages import Arrival, Last, Report
from multiring._agreement.pending import PendingRecord


class Book:
    """The undecided operations of a rank's subtree, and its ranks that have joined.

    A place is a bit: 1 stands for the rank itself, 2 for its first child and the child's subtree, 4 for the second
    child, and so on.
    """

    def __init__(self, rank: int, children: Iterable[int]) -> None:
        self._rank = rank
        self._place = {child: 2 << number for number, child in enumerate(children)}
        self._everybody = (2 << len(self._place)) - 1
        self.pending: dict[str, PendingRecord] = {}
        self.joined = 0  # the places that have joined
        self._last: Last | None = None
        self._told_joined = False
        self.seen = 0  # the number of decisions received
        self._child_seen = dict.fromkeys(self._place, 0)  # the decisions each child had seen at its last report
        # By name, the number of the decision against the operation. A child may report an arrival before it receives
        # the decision. Such an arrival belongs to the refused operation.
        self._against: dict[str, int] = {}
        self._late: dict[str, list[Refused | Deadlock]] = {}  # decisions made before this rank came to the operation

    def check_in_step(self) -> None:
        """Raise ValueError if this rank has joined."""
        if self.joined & 1:
            raise ValueError(f"rank {self._rank} has joined; it cannot announce or join until all ranks have joined")

    def check_announcement(self, operations: Sequence[tuple[str, str]]) -> None:
        """Raise ValueError if this rank cannot announce these operations."""
        self.check_in_step()
        names = [name for name, _ in operations]
        if len(set(names)) < len(names):
            raise ValueError(f"a name occurs twice: {names}")
        for name, terms in operations:
            if self._has_come(1, name):
                raise ValueError(f"rank {self._rank} has announced {name!r} already, and it is not decided yet")
            # JSON would turn a pair of surrogates into one character, which gives another name. The encoding of such a
            # text raises a ValueError.
            f"{name}{terms}".encode()

    def late(self, name: str) -> Refused | Deadlock | None:
        """Return, once, a decision against an operation that preceded this rank's arrival."""
        decisions = self._late.get(name)
        if decisions is None:
            return None
        decision = decisions.pop(0)
        if not decisions:
            del self._late[name]
        return decision

    def come(self, arrivals: Iterable[Arrival], place: int = 1) -> list[str]:
        """Record that the ranks of a place have announced operations; return the names of the operations."""
        names = []
        for arrival in arrivals:
            pending = self.pending.get(arrival.name)
            if pending is None:
                pending = self.pending[arrival.name] = PendingRecord()
            pending.add(place, arrival)
            names.append(arrival.name)
        return names

    def join(self, last: Last, place: int = 1) -> list[str]:
        """Record that all ranks of a place have joined; return the affected operations.

        `last` is the rank that joined last.
        """
        self.joined |= place
        # If two ranks waited equally long, the rank whose join was reported later counts as the last rank.
        if self._last is None or last.waited_us <= self._last.waited_us:
            self._last = last
        return list(self.pending)

    def check_report(self, child: int, report: Report) -> None:
        """Raise ValueError if a child cannot have sent this report."""
        place = self._place[child]
        least = self._child_seen[child]
        if not least <= report.seen <= self.seen:
            raise ValueError(f"the report counts {report.seen} decisions, want {least} to {self.seen}")
        if self.joined & place and (report.arrivals or report.last is not None):
            raise ValueError("the report has news, but its ranks have joined")
        names = [arrival.name for arrival in report.arrivals]
        if len(set(names)) < len(names) or any(self._has_come(place, name) for name, _ in self._current(report)):
            raise ValueError(f"the report announces one of {names[:8]} again")

    def take_report(self, child: int, report: Report) -> list[str]:
        """Record a child's report; return the operations that it affects."""
        place = self._place[child]
        changed = self.come(self._current(report), place)
        self._child_seen[child] = report.seen
        if self._against:
            known_to_all = min(self._child_seen.values())
            self._against = {name: number for name, number in self._against.items() if number > known_to_all}
        return changed if report.last is None else self.join(report.last, place)

    def settled(self, changed: Iterable[str]) -> tuple[list[Arrival], Last | None]:
        """Return the news for the parent, or at the root for the group.

        Each item is returned once. The news consists of the operations that all ranks below have announced, and of
        operations on which ranks differ. If all ranks below have joined, the last of them is also returned.
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
        """Record a decision; return the operations that it ends."""
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
                    self._end(name, Deadlock(blocked, {name: ranks}))  # each note names one operation
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
        """Return the arrivals, except arrivals that were refused after the child had sent them."""
        if not self._against:
            return report.arrivals
        return [arrival for arrival in report.arrivals if report.seen >= self._against.get(arrival.name, 0)]
