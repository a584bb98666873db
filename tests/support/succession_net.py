"""An oracle for the succession: members, a network that loses, delays and cuts, and processes that die and freeze."""

from collections.abc import Callable
from random import Random

from multiring._agreement.referee import Referee
from multiring._agreement.succession import Succession, VoteOutcome
from multiring._agreement.votes import REFEREE, Vote


class SuccessionNet:
    """Processes that vote. Each decision is compared with all others of its generation at once."""

    def __init__(
        self, size: int, random: Random, *, has_referee: bool = False, least: int = 1, loss: float = 0.1
    ) -> None:
        self.random, self.loss, self.least, self.has_referee = random, loss, least, has_referee
        members = range(size)
        self.nodes = {each: self._node(each, 0, tuple(members)) for each in members}
        self.referee = Referee()
        self.kept = {each: Vote(0, tuple(members)) for each in members}
        self.decided: dict[int, tuple[int, ...]] = {0: tuple(members)}
        self.under_way: list[tuple[int, int, bytes]] = []
        self.dead: set[int] = set()
        self.frozen: set[int] = set()
        self.waiting: set[int] = set()  # newcomers at the door
        self.parts: dict[int, int] = {}  # the part of the network in which a process is; 0 if not listed
        self.broken: set[tuple[int, int]] = set()  # pairs of a sender and a receiver between which nothing passes
        self.sent = 0
        self.longest = 0  # bytes of a message

    def _node(self, member: int, generation: int, members: tuple[int, ...]) -> Succession:
        return Succession(member, generation, members, least=self.least, has_referee=self.has_referee)

    def alive(self) -> list[int]:
        return [each for each in self.nodes if each not in self.dead]

    def reaches(self, one: int, other: int) -> bool:
        if (one, other) in self.broken:
            return False
        return REFEREE in (one, other) or self.parts.get(one, 0) == self.parts.get(other, 0)

    # What happens to processes.

    def kill(self, member: int) -> None:
        """Kill a process, which may be a newcomer at the door. Some of its last messages are lost."""
        self.dead.add(member)
        self.waiting.discard(member)
        self.kept.setdefault(member, Vote(-1))
        self.under_way = [each for each in self.under_way if each[0] != member or self.random.random() < 0.5]

    def tell_end(self, to: int, member: int, *, is_kept: bool = True) -> None:
        if to not in self.dead and member in self.dead:
            self.take(to, self.nodes[to].end(member, self.kept[member] if is_kept else None))

    def tell_cut(self, to: int, member: int) -> None:
        if to not in self.dead and to != member:
            self.take(to, self.nodes[to].cut(member))

    def doubt(self, at: int, member: int) -> None:
        if at not in self.dead:
            self.take(at, self.nodes[at].doubt({member}))

    def tell_reach(self, to: int, member: int) -> None:
        if to not in self.dead and to != member:
            self.take(to, self.nodes[to].reach(member))

    def knock(self, newcomer: int, at: int) -> None:
        """A newcomer asks a member to be let in."""
        if at not in self.dead and newcomer not in self.nodes and newcomer not in self.dead:
            self.waiting.add(newcomer)
            self.take(at, self.nodes[at].admit([newcomer]))

    def leave(self, member: int) -> None:
        if member not in self.dead:
            self.take(member, self.nodes[member].leave())

    # Time and messages.

    def tick(self) -> None:
        for newcomer in sorted(self.waiting):  # it comes again
            self.knock(newcomer, self.random.choice(self.alive()))
        for member in self.alive():
            if member not in self.frozen:
                self.take(member, self.nodes[member].tick())

    def deliver(self, most: int) -> None:
        """Deliver some messages, in any order. Each may be lost, and may come twice."""
        for _ in range(min(most, len(self.under_way))):
            sender, to, data = self.under_way.pop(self.random.randrange(len(self.under_way)))
            if self.random.random() < self.loss or not self.reaches(sender, to):
                continue
            if to in self.frozen:
                self.under_way.append((sender, to, data))
                continue
            if self.random.random() < self.loss:
                self.under_way.append((sender, to, data))
            self.receive(sender, to, data)

    def exchange(self, is_wanted: Callable[[int, int, bytes], bool]) -> list[tuple[int, int, bytes]]:
        """Deliver the messages under way that are wanted; return the others, which are under way no more."""
        passing, self.under_way = self.under_way, []
        for each in passing:
            if is_wanted(*each):
                self.receive(*each)
        return [each for each in passing if not is_wanted(*each)]

    def receive(self, sender: int, to: int, data: bytes) -> None:
        if to == REFEREE:
            self.take(REFEREE, self.referee.hear(sender, data))
        elif to in self.nodes and to not in self.dead:
            self.take(to, self.nodes[to].hear(sender, data))
        elif to in self.waiting:
            node = self._node(to, -1, ())
            outcome = node.hear(sender, data)
            if outcome.generations and not node.is_out:
                self.waiting.remove(to)
                self.nodes[to] = node
                self.take(to, outcome)

    def take(self, member: int, outcome: VoteOutcome) -> None:
        if outcome.vote is not None:
            self.kept[member] = outcome.vote
        for generation, members in outcome.generations:
            known = self.decided.setdefault(generation, members)
            assert known == members, f"generation {generation}: {known} and {members}"
            assert not members or len(members) >= self.least
        for to, data in outcome.sends:
            self.sent += 1
            self.longest = max(self.longest, len(data))
            if to in self.dead or (self.frozen and to in self.frozen and self.random.random() < self.loss):
                continue
            self.under_way.append((member, to, data))

    def tell_truth(self) -> None:
        """Tell all that live who has ended, and that they reach the others."""
        self.frozen, self.parts, self.broken = set(), {}, set()
        for one in self.alive():
            for other in sorted({*self.nodes, *self.dead}):
                if other in self.dead:
                    self.tell_end(one, other)
                else:
                    self.tell_reach(one, other)

    def begin(self, member: int) -> None:
        self.take(member, self.nodes[member].begin())

    def settle(self, ticks: int) -> None:
        """Let everything come that was sent, for some ticks, with no loss."""
        self.loss = 0.0
        for _ in range(ticks):
            for _ in range(100):
                if not self.under_way:
                    break
                self.deliver(len(self.under_way))
            self.tick()
