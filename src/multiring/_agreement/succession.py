"""Succession: the ranks' agreement on who is in the next generation, also while more of them are lost.

A state machine without clocks or transport: each method handles an event and returns what to send. Members are named by
numbers that processes keep for good (`Endpoint.number`).
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
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
    voted,
)
from multiring._agreement.votes import (
    NO_BALLOT,
    REFEREE,
    Ballot,
    EndedVotes,
    Vote,
    accepted_last,
    agreeable,
    are_enough,
    removable,
)

PATIENCE = 3  # ticks without an answer until a member counts as silent
_LONGEST = 2 * PATIENCE  # the largest factor of a pause


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

    @property
    def said(self) -> Collection[int]:
        """Who has answered the last question."""
        return self.promises if self.members is None else self.accepts


@dataclass(slots=True)
class _Pace:
    """How long a member has waited in one vote, in ticks.

    quiet: in which nothing came that helps.
    waited: in which others led, and proposed nothing.
    pause: until this member may lead a ballot again.
    failures: the number of its ballots that too few answered.
    """

    quiet: int = 0
    waited: int = 0
    pause: int = 0
    failures: int = 0

    def give_way(self, least: int, place: int) -> None:
        """Leave other ballots a time that differs from member to member."""
        self.quiet, self.pause = 0, least + min(place, _LONGEST)

    def fail(self, place: int) -> None:
        """Leave others a time that grows with each ballot that too few answered."""
        self.give_way(1 + PATIENCE * min(self.failures, _LONGEST), place)
        self.failures += 1


class Succession:
    """One member's part in the agreement on the next generation.

    The lowest member that is not doubted leads a ballot: it asks all for a promise, waits for the answers of those that
    it does not doubt, proposes the members that reach each other, and decides once enough have accepted. A member that
    was taken for silent and speaks again is no longer doubted; one that missed a decision is told it by whoever knows
    it. Messages may be lost, delayed and reordered: `tick` repeats them. The leader may reach too few, while another
    member reaches enough. So its pauses grow, and whoever waits long leads, too.

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
        self._vote = Vote(generation, self.members)
        self._ended = EndedVotes()
        self._cut: set[int] = set()  # members whom the transport does not reach
        self._silent, self._heard = set[int](), set[int]()  # members that did not answer, and that did in this vote
        self._newcomers: set[int] = set()
        self._latest = 0  # the largest number of a ballot seen
        self._lead: _Lead | None = None
        self._pace = _Pace()

    @property
    def is_out(self) -> bool:
        """Whether the others have gone on without this member."""
        return self.member not in self.members

    @property
    def awaited(self) -> set[int]:
        """The members whose answers this member waits for in a vote."""
        if not self.is_voting or self.is_out:
            return set()
        return (set(self._others()) - set(self._lead.said) if self._lead else {self._leader()}) - {self.member}

    # Events.

    def cut(self, member: int) -> VoteOutcome:
        """The transport does not reach `member` any more; whether it lives is unknown."""
        self._cut.add(member)
        self._newcomers.discard(member)
        return self._begin(is_needed=member in self.members)

    def doubt(self, members: Iterable[int]) -> VoteOutcome:
        """Do not wait for answers of these members, which the transport will hardly reach.

        Those that answer nevertheless count like others.
        """
        self._silent |= set(members) - {self.member}
        return self._advance(VoteOutcome())

    def reach(self, member: int) -> VoteOutcome:
        """The transport reaches `member` again."""
        if member in self._cut | self._silent:
            self._cut, self._silent = self._cut - {member}, self._silent - {member}
            self._hope()
        return self._advance(VoteOutcome())

    def end(self, member: int, vote: Vote | None) -> VoteOutcome:
        """`member` ended for good, and will send nothing more.

        Args:
            member: the number of its process, which no other process ever has.
            vote: the last one that it kept; None if nobody has it; Vote(-1) if it is known to have kept none.
        """
        self._learn(member, vote)
        if (later := self._ended.later(self.generation)) is not None:
            return self._move_on(VoteOutcome(), *later)
        return self._begin(is_needed=member in self.members)

    def admit(self, newcomers: Iterable[int]) -> VoteOutcome:
        """Have the next generation contain these processes, too, which have come to this member.

        Call it again as long as they come: one that is in already is told so.
        """
        known = set(newcomers) - self._ended.keys()
        self._expect(known)
        outcome = self._begin(is_needed=bool(self._newcomers))
        for newcomer in sorted(known & set(self.members) - {self.member}):
            self._tell(outcome, newcomer)
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
        lead, pace = self._lead, self._pace
        pace.pause, pace.quiet = max(0, pace.pause - 1), pace.quiet + 1
        if lead is None:
            leader = self._leader()
            if leader != self.member:
                pace.waited += 1
                if pace.waited > 3 * PATIENCE * (1 + self._place()):
                    self._open(outcome)
                # One that leads is silent while it waits for others; one that has said nothing at all does not lead.
                elif pace.quiet >= (3 * PATIENCE if leader in self._heard else PATIENCE):
                    self._silent.add(leader)
                    pace.quiet = 0
                else:
                    self._send(outcome, leader, CALL)
            return self._advance(outcome)
        if pace.quiet >= PATIENCE:
            self._silent |= set(self._others()) - set(lead.said)
        if pace.quiet >= 2 * PATIENCE:
            self._lead = None
            pace.fail(self._place())
            return self._advance(outcome)
        for other in self._receivers():
            if other not in lead.said:
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
                self._tell(outcome, sender)
            return outcome
        if message.kind == DECIDED:
            return self._move_on(outcome, message.generation + 1, message.members)
        if message.generation > self.generation:  # this member has missed a decision, and is told it
            self._send(outcome, sender, CALL)
            return outcome
        if self.is_out or sender not in {*self.members, REFEREE}:
            return outcome
        for member, vote in message.ended.items():
            self._learn(member, vote)
        if (later := self._ended.later(self.generation)) is not None:
            return self._move_on(outcome, *later)
        self._expect(message.newcomers)
        self._silent, self._heard = self._silent - {sender}, self._heard | {sender}
        self.is_voting = True
        self._latest = max(self._latest, message.ballot.number)
        self._take(outcome, sender, message)
        return self._advance(outcome)

    # What messages lead to.

    def _take(self, outcome: VoteOutcome, sender: int, message: VoteMessage) -> None:
        lead, ballot = self._lead, message.ballot
        if lead is not None and ballot > lead.ballot:
            self._lead = None
            self._pace.give_way(2 * PATIENCE, self._place())
        if message.kind in (ASK, PROPOSE):
            kind, vote = voted(self._vote, message)
            if kind != REFUSE:
                self._pace.quiet = 0
                self._pace.waited = self._pace.waited if kind == PROMISE else 0
                self._keep(outcome, vote)
            self._send(outcome, sender, kind, ballot=vote.promised)
        elif lead is not None and ballot == lead.ballot:
            if message.kind == PROMISE and lead.members is None:
                lead.promises[sender] = message
                self._pace.quiet = 0
            elif message.kind == ACCEPT and lead.members is not None:
                lead.accepts.add(sender)
                self._pace.quiet = 0

    def _hope(self) -> None:
        """Lead again at once: after this news, a ballot may succeed."""
        self._pace.pause = self._pace.failures = 0

    def _begin(self, *, is_needed: bool, outcome: VoteOutcome | None = None) -> VoteOutcome:
        outcome = outcome or VoteOutcome()
        if is_needed and not self.is_out:
            self.is_voting, self._pace.quiet = True, self._pace.quiet if self.is_voting else 0
            if (leader := self._leader()) != self.member:
                self._send(outcome, leader, CALL)
        return self._advance(outcome)

    def _advance(self, outcome: VoteOutcome) -> VoteOutcome:
        """Do what the present state allows: lead a ballot, propose, decide."""
        if not self.is_voting or self.is_out:
            return outcome
        if self._lead is None and (self._pace.pause or self._leader() != self.member):
            return outcome
        lead = self._lead or self._open(outcome)
        # Every member that is not doubted has answered.
        if lead.members is None and set(self.members) <= lead.promises.keys() | self._doubted():
            self._propose(outcome, lead)
        if lead.members is not None and self._is_enough(lead.ballot, lead.accepts):
            return self._move_on(outcome, self.generation + 1, lead.members, is_own=True)
        return outcome

    def _open(self, outcome: VoteOutcome) -> _Lead:
        """Begin a ballot that is later than all that are known, those of ended members among them."""
        self._latest = max(self._latest, _latest_ballot(self._vote, self._ended.values(), self.generation)) + 1
        self._pace.quiet = self._pace.waited = 0
        lead = self._lead = _Lead(Ballot(self._latest, self.member))
        self._keep(outcome, self._vote.promise(lead.ballot))
        lead.promises[self.member] = self._message(PROMISE, ballot=lead.ballot)
        for other in self._receivers():
            self._send(outcome, other, ASK)
        return lead

    def _propose(self, outcome: VoteOutcome, lead: _Lead) -> None:
        if not self._is_enough(lead.ballot, lead.promises):
            return
        votes = [promise.vote for promise in lead.promises.values()]
        members = accepted_last([*votes, *removable(self._ended, self.generation, lead.ballot).values()])
        if members is None:
            left = _candidates(self.members, lead.promises, self._ended, {self.member: self._cut})
            members = (*left, *sorted(self._newcomers)) if left else ()  # without newcomers if all want to leave
            self.too_few = members if len(members) < self.least else ()
            if self.too_few:
                return
        self._keep(outcome, self._vote.accept(lead.ballot, members))
        lead.members, self._pace.quiet = members, 0
        lead.accepts.add(self.member)
        for other in self._receivers():
            self._send(outcome, other, PROPOSE)

    def _move_on(
        self, outcome: VoteOutcome, generation: int, members: tuple[int, ...], *, is_own: bool = False
    ) -> VoteOutcome:
        if generation <= self.generation:
            return outcome
        former, self.generation, self.members = set(self.members), generation, members
        self._newcomers -= set(members)
        self._silent, self._heard = set(), set()  # who was slow then may be quick now
        self._ended.shorten(generation)
        self._lead, self.too_few, self._pace, self._latest = None, (), _Pace(), 0
        self._vote = Vote(generation, members)
        self._keep(outcome, self._vote, changed=True)
        outcome.generations.append((generation, members))
        # Who decided tells all. A member that misses it asks again; a newcomer cannot, so every member tells it.
        told = {*former, *members} if is_own else {*members} - former
        for other in sorted(told - {self.member} - self._ended.keys()):
            self._tell(outcome, other)
        if self.has_referee and is_own:
            self._tell(outcome, REFEREE)
        lost = (self._cut | self._ended.keys()) & set(members)
        self.is_voting = False
        if lost or self._newcomers or (self.leaving and not self.is_out):
            return self._begin(is_needed=True, outcome=outcome)
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

    def _place(self) -> int:
        """Return how many members would lead before this one."""
        return len(set(self.members[: self.members.index(self.member)]) - self._cut - self._ended.keys())

    def _is_enough(self, ballot: Ballot, said: Collection[int]) -> bool:
        ended = removable(self._ended, self.generation, ballot)
        return are_enough(self.members, said, ended, has_referee=self.has_referee, referee=REFEREE in said)

    # Sending and keeping.

    def _learn(self, member: int, vote: Vote | None) -> None:
        """Remember who ended. A vote that somebody kept is worth more than none."""
        if self._ended.learn(member, vote, self.generation):
            self._hope()
        self._newcomers.discard(member)

    def _expect(self, newcomers: Collection[int]) -> None:
        more = set(newcomers) - self._newcomers - set(self.members) - self._ended.keys()
        if more:
            self._newcomers |= more
            self._hope()

    def _keep(self, outcome: VoteOutcome, vote: Vote, *, changed: bool = False) -> None:
        if changed or vote != self._vote:
            self._vote = outcome.vote = vote

    def _message(self, kind: str, *, ballot: Ballot = NO_BALLOT) -> VoteMessage:
        lead = self._lead
        return VoteMessage(
            kind,
            self.generation,
            ended={each: vote for each, vote in self._ended.items() if each in self.members},
            newcomers=frozenset(self._newcomers),
            ballot=lead.ballot if lead is not None and kind in (ASK, PROPOSE) else ballot,
            vote=self._vote,
            members=() if lead is None else lead.members or (),
            doubts=frozenset(self._cut & set(self.members)),
            leaving=self.leaving,
        )

    def _send(self, outcome: VoteOutcome, to: int, kind: str, *, ballot: Ballot = NO_BALLOT) -> None:
        outcome.sends.append((to, encode(self._message(kind, ballot=ballot))))

    def _tell(self, outcome: VoteOutcome, to: int) -> None:
        """Send the latest decision that this member knows."""
        decided = VoteMessage(DECIDED, self.generation - 1, members=self.members)
        outcome.sends.append((to, encode(decided)))


def _latest_ballot(own: Vote, ended: Iterable[Vote | None], generation: int) -> int:
    """Return the largest number of a ballot that was promised in a generation, by this member or by ended ones."""
    votes = [own, *filter(None, ended)]
    return max(vote.promised.number for vote in votes if vote.generation == generation)


def _candidates(
    members: Sequence[int],
    promises: Mapping[int, VoteMessage],
    ended: Collection[int],
    cut: Mapping[int, Collection[int]],
) -> list[int]:
    """Return the members that have promised, that want to stay, and that reach each other.

    Args:
        members: all members, by rank.
        promises: the promises, by member.
        ended: the members that ended.
        cut: by member, whom it does not reach, where this is known better than by its promise.
    """
    stay = [each for each in members if each in promises and each not in ended and not promises[each].leaving]
    return agreeable(stay, {each: cut.get(each, promises[each].doubts) for each in stay})
