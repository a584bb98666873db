"""An oracle for the agreement: members, messages with any delay, and programs that announce operations and wait.

The oracle tracks what every rank has announced, and checks each decision against it.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator
from random import Random

from multiring._agreement import (
    AgreementOutcome,
    Deadlock,
    Decision,
    Joined,
    Lost,
    Member,
    Missing,
    Note,
    Ready,
    Refused,
    Silent,
)
from multiring._agreement.tree import place_of

Program = Iterator[None]


class Net:
    """A simulated group. The n-th decision of a name answers each rank's n-th announcement of the name."""

    def __init__(self, size: int, radix: int, random: Random) -> None:
        self.size, self.radix, self.random = size, radix, random
        self.members = [Member(rank, size, radix) for rank in range(size)]
        self.under_way: dict[tuple[int, int], deque[bytes]] = {}
        self.events = 0
        self.decisions: list[list[Decision]] = [[] for _ in range(size)]
        self.notes: list[list[Note]] = [[] for _ in range(size)]
        self.said: list[dict[str, list[str]]] = [defaultdict(list) for _ in range(size)]  # signatures by name
        self.open: list[set[str]] = [set() for _ in range(size)]
        self.decided: Counter[str] = Counter()  # number of decisions of the root by name
        self.joined: set[int] = set()
        self.joining: set[int] = set()  # joined ranks that have not got the decision yet
        self.blocked: dict[int, str] = {}
        self.stopped: set[int] = set()
        self.gone: set[int] = set()
        self.running: dict[int, Program] = {}

    # Actions of ranks.

    def announce(self, rank: int, *operations: tuple[str, str]) -> None:
        for name, terms in operations:
            self.said[rank][name].append(terms)
            self.open[rank].add(name)
        self._take(rank, self.members[rank].announce_all(operations))

    def join(self, rank: int, waited_us: int = 0) -> None:
        self.joined.add(rank)
        self.joining.add(rank)
        self._take(rank, self.members[rank].join(waited_us))

    def wait_for(self, rank: int, name: str | None) -> None:
        if name is None:
            del self.blocked[rank]
        else:
            self.blocked[rank] = name
        self._take(rank, self.members[rank].wait_for(name))

    def inquire(self, rank: int) -> None:
        self._take(rank, self.members[rank].inquire())

    def conclude(self, rank: int) -> None:
        self._take(rank, self.members[rank].conclude())

    def lose(self, rank: int, lost: int) -> None:
        """Tell a living rank that rank `lost` is gone."""
        if rank not in self.gone:
            self._take(rank, self.members[rank].lost(lost))

    def kill(self, rank: int) -> None:
        """Kill a rank; only a part of its messages in flight arrives."""
        self.gone.add(rank)
        for (sender, to), messages in list(self.under_way.items()):
            if sender == rank:
                for _ in range(self.random.randint(0, len(messages))):
                    messages.pop()
            if to == rank or not messages:
                del self.under_way[sender, to]

    def next_to(self, rank: int) -> list[int]:
        place = place_of(rank, self.size, self.radix)
        children = [child.start for child in place.children]
        return children if place.parent is None else [place.parent, *children]

    # Execution.

    def deliver(self) -> bool:
        """Deliver a random message in flight; return False if there is none."""
        pairs = [(sender, to) for sender, to in self.under_way if to not in self.stopped]
        if pairs:
            self.pass_on(*self.random.choice(pairs))
        return bool(pairs)

    def pass_on(self, sender: int, to: int) -> None:
        """Deliver the next message from `sender` to `to`."""
        messages = self.under_way[sender, to]
        message = messages.popleft()
        if not messages:
            del self.under_way[sender, to]
        self._take(to, self.members[to].receive(sender, message))

    def settle(self) -> None:
        while self.deliver():
            pass

    def start(self, programs: Iterable[Program]) -> None:
        self.running = dict(enumerate(programs))

    def run(self, inquiries: float = 0.0) -> bool:
        """Run the programs until nothing changes any more; return whether all have ended.

        `inquiries` is the probability that a rank asks for missing ranks after another rank's step.
        """
        while True:
            before = self.events
            for rank in self.random.sample(list(self.running), len(self.running)):
                if next(self.running[rank], "ended") == "ended":
                    del self.running[rank]
                if self.random.random() < inquiries:
                    self.inquire(self.random.randrange(self.size))
                for _ in range(self.random.choice((0, 0, 1, 3))):
                    self.deliver()
            if not self.under_way and self.events == before:
                return not self.running
            self.deliver()

    def program(self, rank: int, operations: Iterable[tuple[str, str]], waits: float = 0.0) -> Program:
        """Run as a rank that announces operations one after the other and waits for some of them."""
        for name, terms in operations:
            yield from self._until_decided(rank, name)
            self.announce(rank, (name, terms))
            if self.random.random() < waits:
                yield from self._until_decided(rank, name)
            yield

    def _until_decided(self, rank: int, name: str) -> Program:
        if name in self.open[rank]:
            self.wait_for(rank, name)
            while name in self.open[rank]:
                yield
            self.wait_for(rank, None)

    # Invariants.

    def check_all_alike(self) -> None:
        for rank, decisions in enumerate(self.decisions):
            assert decisions == self.decisions[0], f"rank {rank}"

    def missing(self) -> dict[str, tuple[int, ...]]:
        """Return, for each announced but undecided name, the ranks that it still waits for."""
        names = sorted({name for said in self.said for name in said if self._has_come_again(name)})
        return {name: tuple(rank for rank in range(self.size) if self._is_missing(rank, name)) for name in names}

    def stuck(self) -> set[str]:
        """Return the names that can never complete, by removing the names that can, one after the other."""
        missing = self.missing()
        waits = {rank: name for rank, name in self.blocked.items() if name in missing and rank not in missing[name]}
        left = set(missing)
        while True:
            able = {name for name in left if all(waits.get(rank) not in left for rank in missing[name])}
            if not able:
                return left
            left -= able

    def _has_come_again(self, name: str) -> bool:
        return any(len(said[name]) > self.decided[name] for said in self.said if name in said)

    def _is_missing(self, rank: int, name: str) -> bool:
        return len(self.said[rank].get(name, ())) <= self.decided[name] and rank not in self.joined

    def _take(self, rank: int, outcome: AgreementOutcome) -> None:
        self.events += 1
        for to, message in outcome.messages:
            assert to in self.next_to(rank)
            if to not in self.gone:
                self.under_way.setdefault((rank, to), deque()).append(message)
        for decision in outcome.decisions:
            if rank == 0:
                self._judge(decision)
            self.decisions[rank].append(decision)
            self._close(rank, decision)
        for note in outcome.notes:
            self.notes[rank].append(note)
            if not isinstance(note, Silent | Lost):
                self._close(rank, note)

    def _close(self, rank: int, decision: Decision | Note) -> None:
        match decision:
            case Ready(name):
                assert name in self.open[rank] or rank in self.joining
                self.open[rank].discard(name)
            case Refused(name):
                self.open[rank].discard(name)
            case Deadlock(_, names):
                self.open[rank] -= names.keys()
            case Joined():
                self.joining.remove(rank)
                assert not self.open[rank]
            case Lost():
                self.open[rank].clear()

    def _judge(self, decision: Decision) -> None:
        """Check a decision of the root against the announcements of every rank."""
        match decision:
            case Ready(name, terms, joined):
                self.decided[name] += 1
                number = self.decided[name]
                absent = {rank for rank in range(self.size) if len(self.said[rank].get(name, ())) < number}
                assert absent <= self.joined
                assert joined == len(absent)
                assert {said[name][number - 1] for said in self.said if len(said.get(name, ())) >= number} == {terms}
            case Refused(name):
                self.decided[name] += 1
                self._judge_refusal(decision, self.decided[name])
            case Deadlock(blocked, names):
                stuck, missing = self.stuck(), self.missing()
                assert names.keys() <= stuck
                # A rank that was not blocked may have announced since the inquiry. Nothing is known of ranks
                # below a silent rank.
                assert self.stopped or all(set(missing[name]) <= set(ranks) for name, ranks in names.items())
                assert all(self.blocked[rank] == name for rank, name in blocked.items())
                self.decided.update(names.keys())
            case Joined(last):
                assert self.joined == set(range(self.size))
                assert last in self.joined
                assert not self.missing()
                self.joined = set()
                for said in self.said:
                    said.clear()
                self.decided.clear()
            case Missing():
                assert not decision.silent or self.stopped

    def _judge_refusal(self, refused: Refused, number: int) -> None:
        came = {rank: said[refused.name] for rank, said in enumerate(self.said) if refused.name in said}
        terms = {rank: said[number - 1] for rank, said in came.items() if len(said) >= number}
        assert refused.terms.items() <= terms.items()
        counts = Counter(terms.values())
        assert len(refused.counts) > 1
        assert all(0 < count <= counts[said] for said, count in refused.counts.items())
        assert set(refused.terms.values()) == refused.counts.keys()
