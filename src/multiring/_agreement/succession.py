"""Succession: the ranks' agreement on who is in the next generation, also while more of them are lost.

A state machine without clocks or transport: each method handles an event and returns what to send. Members are named by
numbers that processes keep for good (`Endpoint.number`).
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from multiring._agreement.vote_messages import (
    ACCEPT,
    ASK,
    CALL,
    DECIDED,
    PROMISE,
    PROPOSE,
    REFUSE,
    VoteMessage,
    decode,
    encode,
)
from multiring._agreement.votes import (
    NO_BALLOT,
    REFEREE,
    Ballot,
    Vote,
    accepted_last,
    agreeable,
    are_enough,
    removable,
)

PATIENCE = 3  # ticks without an answer until a member counts as silent


@dataclass(slots=True)
class VoteOutcome:
    """What an event leads to.

    vote: this member's vote, if it has changed. Keep it where it outlives the process before anything is sent.
    sends: pairs of a receiver (a member's number, or REFEREE) and a message.
    generations: the generations that were decided, as pairs of a number and the members by rank.
    """

    vote: Vote | None = None
    sends: list[tuple[int, bytes]] = field(default_factory=list)
    generations: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)


@dataclass(slots=True)
class _Lead:
    """A ballot that this member leads."""

    ballot: Ballot
    promises: dict[int, VoteMessage] = field(default_factory=dict)
    members: tuple[int, ...] | None = None  # what was proposed
    accepts: set[int] = field(default_factory=set)


class Succession:
    """One member's part in the agreement on the next generation.

    The lowest member that is not doubted leads a ballot: it asks all for a promise, waits for the answers of those that
    it does not doubt, proposes the members that reach each other, and decides once enough have accepted. A member that
    was taken for silent and speaks again is no longer doubted; one that missed a decision is told it by whoever knows
    it. Messages may be lost, delayed and reordered: `tick` repeats them.

    Args:
        member: this process's number.
        generation: the number of the present generation.
        members: the numbers of its processes, by rank.
        least: fewer members than these are never proposed.
        has_referee: whether the launcher votes when exactly half of the members can; the same on all members.
    """

    def __init__(
        self, member: int, generation: int, members: Sequence[int], *, least: int = 1, has_referee: bool = False
    ) -> None:
        self.member, self.least, self.has_referee = member, least, has_referee
        self.generation, self.members = generation, tuple(members)
        self.is_voting = False
        self.leaving = False  # whether this member wants to leave with the next generation
        self.too_few: tuple[int, ...] = ()  # who would go on if they were not fewer than `least`
        self._decided: dict[int, tuple[int, ...]] = {}  # the members of former and of this generation
        self._vote = Vote(generation, self.members)
        self._ended: dict[int, Vote | None] = {}
        self._cut: set[int] = set()  # members whom the transport does not reach
        self._silent: set[int] = set()  # members that did not answer
        self._newcomers: set[int] = set()
        self._latest = 0  # the largest number of a ballot seen
        self._lead: _Lead | None = None
        self._quiet = 0  # ticks in which nothing came that helps
        self._pause = 0  # ticks until this member may lead a ballot again

    @property
    def is_out(self) -> bool:
        """Whether the others have gone on without this member."""
        return self.member not in self.members

    # Events.

    def cut(self, member: int) -> VoteOutcome:
        """The transport does not reach `member` any more; whether it lives is unknown."""
        self._cut.add(member)
        self._newcomers.discard(member)
        return self._begin(is_needed=member in self.members)

    def reach(self, member: int) -> VoteOutcome:
        """The transport reaches `member` again."""
        self._cut.discard(member)
        self._silent.discard(member)
        return self._advance(VoteOutcome())

    def end(self, member: int, vote: Vote | None) -> VoteOutcome:
        """`member` ended for good. `vote` is the last one that it kept, None if nobody has it."""
        self._learn(member, vote)
        if (later := self._later()) is not None:
            return self._move_on(VoteOutcome(), *later)
        return self._begin(is_needed=member in self.members)

    def admit(self, newcomers: Iterable[int]) -> VoteOutcome:
        """Have the next generation contain these processes, too, which have come to this member.

        Call it again as long as they come: one that is in already is told so.
        """
        known = set(newcomers) - self._ended.keys()
        self._newcomers |= known - set(self.members)
        outcome = self._begin(is_needed=bool(self._newcomers))
        for newcomer in sorted(known & set(self.members) - {self.member}):
            self._tell(outcome, newcomer, self.generation - 1)
        return outcome

    def leave(self) -> VoteOutcome:
        """Have the next generation not contain this member, which helps to decide it."""
        self.leaving = True
        return self._begin(is_needed=True)

    def begin(self) -> VoteOutcome:
        """Something failed, and this member does not know why: it asks, since the others may be without it already."""
        return self._begin(is_needed=True)

    def tick(self) -> VoteOutcome:
        """A time has passed in which a message and its answer come, usually."""
        outcome = VoteOutcome()
        if not self.is_voting or self.is_out:
            return outcome
        self._pause = max(0, self._pause - 1)
        self._quiet += 1
        lead = self._lead
        if lead is None:
            leader = self._leader()
            if leader != self.member:
                if self._quiet >= 3 * PATIENCE:
                    self._silent.add(leader)
                    self._quiet = 0
                else:
                    self._send(outcome, leader, CALL)
            return self._advance(outcome)
        said = lead.promises if lead.members is None else lead.accepts
        if self._quiet >= PATIENCE:
            self._silent |= set(self._others()) - set(said)
        if self._quiet >= 2 * PATIENCE:
            self._give_way(1)
            return self._advance(outcome)
        for other in self._receivers():
            if other not in said:
                self._send(outcome, other, ASK if lead.members is None else PROPOSE)
        return self._advance(outcome)

    def hear(self, sender: int, data: bytes) -> VoteOutcome:
        """A message has come from `sender`, a member or the referee.

        Raises:
            ValueError: `data` is no message of a vote.
        """
        message, outcome = decode(data), VoteOutcome()
        if message.generation < self.generation:
            if message.kind != DECIDED:
                self._tell(outcome, sender, message.generation)
            return outcome
        if message.kind == DECIDED:
            return self._move_on(outcome, message.generation + 1, message.members)
        if message.generation > self.generation:  # this member has missed a decision, and is told it
            self._send(outcome, sender, CALL)
            return outcome
        if self.is_out:
            return outcome
        for member, vote in message.ended.items():
            self._learn(member, vote)
        if (later := self._later()) is not None:
            return self._move_on(outcome, *later)
        self._newcomers |= message.newcomers - set(self.members) - self._ended.keys()
        self._silent.discard(sender)
        self.is_voting = True
        self._latest = max(self._latest, message.ballot.number)
        self._take(outcome, sender, message)
        return self._advance(outcome)

    # What messages lead to.

    def _take(self, outcome: VoteOutcome, sender: int, message: VoteMessage) -> None:
        lead, ballot = self._lead, message.ballot
        if message.kind in (ASK, PROPOSE):
            is_question = message.kind == ASK
            vote = self._vote.promise(ballot) if is_question else self._vote.accept(ballot, message.members)
            if vote.promised != ballot:
                self._send(outcome, sender, REFUSE, ballot=vote.promised)
                return
            if lead is not None and ballot > lead.ballot:
                self._give_way(PATIENCE)
            self._quiet = 0
            self._keep(outcome, vote)
            self._send(outcome, sender, PROMISE if is_question else ACCEPT, ballot=ballot)
        elif message.kind == REFUSE:
            if lead is not None and ballot > lead.ballot:
                self._give_way(PATIENCE)
        elif lead is not None and ballot == lead.ballot:
            if message.kind == PROMISE and lead.members is None:
                lead.promises[sender] = message
                self._quiet = 0
            elif message.kind == ACCEPT and lead.members is not None:
                lead.accepts.add(sender)
                self._quiet = 0

    def _give_way(self, least: int) -> None:
        """Give the ballot up, and leave other ballots a time that differs from member to member."""
        self._lead, self._quiet = None, 0
        self._pause = least + self.members.index(self.member)

    def _begin(self, *, is_needed: bool) -> VoteOutcome:
        outcome = VoteOutcome()
        if is_needed and not self.is_out:
            if not self.is_voting:
                self.is_voting, self._quiet = True, 0
            leader = self._leader()
            if leader != self.member:
                self._send(outcome, leader, CALL)
        return self._advance(outcome)

    def _advance(self, outcome: VoteOutcome) -> VoteOutcome:
        """Do what the present state allows: lead a ballot, propose, decide."""
        if not self.is_voting or self.is_out:
            return outcome
        if self._lead is None:
            if self._pause or self._leader() != self.member:
                return outcome
            self._quiet = 0
            self._latest = max(self._latest, self._vote.promised.number) + 1
            self._lead = _Lead(Ballot(self._latest, self.member))
            self._keep(outcome, self._vote.promise(self._lead.ballot))
            self._lead.promises[self.member] = self._message(PROMISE, ballot=self._lead.ballot)
            for other in self._receivers():
                self._send(outcome, other, ASK)
        lead = self._lead
        if lead.members is None and self._is_heard(lead.promises):
            self._propose(outcome, lead)
        if lead.members is not None and self._is_enough(lead.ballot, lead.accepts):
            return self._move_on(outcome, self.generation + 1, lead.members, is_own=True)
        return outcome

    def _propose(self, outcome: VoteOutcome, lead: _Lead) -> None:
        ended = removable(self._ended, self.generation, lead.ballot)
        if not self._is_enough(lead.ballot, lead.promises):
            return
        votes = [promise.vote for promise in lead.promises.values()]
        members = accepted_last([*votes, *ended.values()])
        if members is None:
            left = self._candidates()
            members = (*left, *sorted(self._newcomers)) if left else ()  # without newcomers if all want to leave
            self.too_few = members if len(members) < self.least else ()
            if self.too_few:
                return
        self._keep(outcome, self._vote.accept(lead.ballot, members))
        lead.members, self._quiet = members, 0
        lead.accepts.add(self.member)
        for other in self._receivers():
            self._send(outcome, other, PROPOSE)

    def _move_on(
        self, outcome: VoteOutcome, generation: int, members: tuple[int, ...], *, is_own: bool = False
    ) -> VoteOutcome:
        if generation <= self.generation:
            return outcome
        former = set(self.members)
        self.generation, self.members = generation, members
        self._decided[generation] = members
        self._newcomers -= set(members)
        self._silent &= set(members)
        self._lead, self._quiet, self._pause, self._latest, self.too_few = None, 0, 0, 0, ()
        self._vote = Vote(generation, members)
        self._keep(outcome, self._vote, changed=True)
        outcome.generations.append((generation, members))
        # Who decided tells all. A member that misses it asks again; a newcomer cannot, so every member tells it.
        told = former | set(members) if is_own else set(members) - former
        for other in sorted(told - {self.member} - self._ended.keys()):
            self._tell(outcome, other, generation - 1)
        if self.has_referee and is_own:
            self._tell(outcome, REFEREE, generation - 1)
        lost = (self._cut | self._ended.keys()) & set(members)
        self.is_voting = False
        if lost or self._newcomers or (self.leaving and not self.is_out):
            begun = self._begin(is_needed=True)
            outcome.vote = begun.vote or outcome.vote
            outcome.sends += begun.sends
            outcome.generations += begun.generations
        return outcome

    # Who is there.

    def _doubted(self) -> set[int]:
        return self._cut | self._silent | self._ended.keys()

    def _others(self) -> list[int]:
        return [each for each in self.members if each != self.member and each not in self._ended]

    def _receivers(self) -> list[int]:
        return [*self._others(), *([REFEREE] if self.has_referee else [])]

    def _leader(self) -> int:
        doubted = self._doubted()
        return next((each for each in self.members if each == self.member or each not in doubted), self.member)

    def _is_heard(self, said: Collection[int]) -> bool:
        """Return whether every member that is not doubted has answered."""
        return set(self.members) <= set(said) | self._doubted()

    def _is_enough(self, ballot: Ballot, said: Collection[int]) -> bool:
        ended = removable(self._ended, self.generation, ballot)
        return are_enough(self.members, said, ended, has_referee=self.has_referee, referee=REFEREE in said)

    def _candidates(self) -> list[int]:
        """Return the members that have promised, that want to stay, and that reach each other."""
        promises = {} if self._lead is None else self._lead.promises
        stay = [
            each for each in self.members if each in promises and each not in self._ended and not promises[each].leaving
        ]
        doubts = {each: set(promises[each].doubts) for each in stay}
        if self.member in doubts:
            doubts[self.member] = self._cut
        return agreeable(stay, doubts)

    # Sending and keeping.

    def _learn(self, member: int, vote: Vote | None) -> None:
        """Remember who ended. A vote that somebody kept is worth more than none."""
        if self._ended.get(member) is None:
            self._ended[member] = vote
        if vote is not None and vote.generation == self.generation:
            self._latest = max(self._latest, vote.promised.number)
        self._newcomers.discard(member)

    def _later(self) -> tuple[int, tuple[int, ...]] | None:
        """Return a later generation in which a member has ended, and its members: this member has missed it."""
        votes = [vote for vote in self._ended.values() if vote is not None and vote.generation > self.generation]
        vote = max(votes, key=lambda vote: vote.generation, default=None)
        return None if vote is None else (vote.generation, vote.members)

    def _keep(self, outcome: VoteOutcome, vote: Vote, *, changed: bool = False) -> None:
        if changed or vote != self._vote:
            self._vote = outcome.vote = vote

    def _message(self, kind: str, *, ballot: Ballot = NO_BALLOT) -> VoteMessage:
        lead = self._lead
        return VoteMessage(
            kind,
            self.generation,
            ended=self._ended,
            newcomers=frozenset(self._newcomers),
            ballot=lead.ballot if lead is not None and kind in (ASK, PROPOSE) else ballot,
            vote=self._vote,
            members=() if lead is None else lead.members or (),
            doubts=frozenset(self._cut & set(self.members)),
            leaving=self.leaving,
        )

    def _send(self, outcome: VoteOutcome, to: int, kind: str, *, ballot: Ballot = NO_BALLOT) -> None:
        outcome.sends.append((to, encode(self._message(kind, ballot=ballot))))

    def _tell(self, outcome: VoteOutcome, to: int, generation: int) -> None:
        """Send the decision that ended `generation`, if this member knows it."""
        if (members := self._decided.get(generation + 1)) is not None:
            outcome.sends.append((to, encode(VoteMessage(DECIDED, generation, members=members))))
