"""Votes on a generation: what a member has promised and accepted, and when enough members have voted.

The rule of votes is Paxos (Lamport, "Paxos made simple", 2001), with one change: members may end for good. What an
ended member said last is kept by whoever saw its end. Then it will never say more, so the others need not wait for it.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

REFEREE = -1  # the number of the referee, which is no member


class Ballot(NamedTuple):
    """One attempt to decide a generation. Later attempts are larger."""

    number: int
    member: int  # who leads the attempt


NO_BALLOT = Ballot(0, REFEREE)


@dataclass(frozen=True, slots=True)
class Vote:
    """All that a member has said in the vote on one generation.

    A member's vote must be kept where it outlives the member, before the member's messages are sent.

    generation: the generation that the vote would end.
    members: its members. Who reads the vote may have missed that the generation began.
    promised: no earlier ballot is accepted any more.
    accepted_in: the latest ballot in which the member accepted, or NO_BALLOT.
    accepted: the members of the next generation that it accepted then.
    """

    generation: int
    members: tuple[int, ...] = ()
    promised: Ballot = NO_BALLOT
    accepted_in: Ballot = NO_BALLOT
    accepted: tuple[int, ...] = ()

    def promise(self, ballot: Ballot) -> "Vote":
        """Return the vote after a promise, or this one if a later ballot was promised."""
        return replace(self, promised=ballot) if ballot >= self.promised else self

    def accept(self, ballot: Ballot, members: tuple[int, ...]) -> "Vote":
        """Return the vote after an acceptance, or this one if a later ballot was promised."""
        if ballot < self.promised:
            return self
        return replace(self, promised=ballot, accepted_in=ballot, accepted=members)


class EndedVotes(dict[int, Vote | None]):
    """By each member that ended, the last vote that it kept; None if nobody has it."""

    def learn(self, member: int, vote: Vote | None, generation: int) -> bool:
        """Return whether it is news, in `generation`, that the member ended or what it had said.

        The latest vote counts: a launcher may have an earlier one than the member's host.
        """
        vote, known = _shortened(vote, generation), self.get(member)
        if member in self and (vote is None or (known is not None and _age(vote) <= _age(known))):
            return False
        self[member] = vote
        return True

    def later(self, generation: int) -> tuple[int, tuple[int, ...]] | None:
        """Return the latest generation in which a member has ended, and its members; None if `generation` is."""
        vote = max(filter(None, self.values()), key=_age, default=None)
        return None if vote is None or vote.generation <= generation else (vote.generation, vote.members)

    def shorten(self, generation: int) -> None:
        """Forget what does not matter in `generation`, since messages contain the votes of the members that ended."""
        for member, vote in self.items():
            self[member] = _shortened(vote, generation)


def _age(vote: Vote) -> tuple[int, Ballot, Ballot]:
    return vote.generation, vote.promised, vote.accepted_in


def _shortened(vote: Vote | None, generation: int) -> Vote | None:
    if vote is None or vote.generation > generation:
        return vote
    return replace(vote, members=()) if vote.generation == generation else Vote(vote.generation)


def removable(ended: Mapping[int, Vote | None], generation: int, ballot: Ballot) -> dict[int, Vote]:
    """Return the ended members that do not count in a ballot, and their votes on the generation.

    An end whose vote nobody kept counts as silence: the member may have accepted what nobody else knows. So does the
    end of a member that had promised a later ballot.
    """
    found = {}
    for member, vote in ended.items():
        if vote is None:
            continue
        own = vote if vote.generation == generation else Vote(generation)
        if own.promised <= ballot:
            found[member] = own
    return found


def are_enough(
    members: Sequence[int], said: Collection[int], ended: Collection[int], *, has_referee: bool, referee: bool
) -> bool:
    """Return whether those who `said` yes may decide for all members.

    They must be more than half of the members that have not ended. At exactly half, the referee decides; in a job
    without one, the half with the lowest rank.

    Two such sets, each with ends of its own, always share a member that has not ended: docs/decisions/0142 has the
    proof. So there are never two decisions.

    Args:
        members: the members of the generation, by rank.
        said: the members that said yes.
        ended: the members that do not count, see `removable`.
        has_referee: whether the job has a referee; the same on all members.
        referee: whether the referee said yes.
    """
    left = [member for member in members if member not in ended]
    yes = sum(member in said for member in left)
    if 2 * yes != len(left):
        return 2 * yes > len(left)
    return bool(left) and (referee if has_referee else left[0] in said)


def accepted_last(votes: Collection[Vote]) -> tuple[int, ...] | None:
    """Return what was accepted in the latest ballot of all the votes, or None if nothing was."""
    latest = max(votes, key=lambda vote: vote.accepted_in, default=None)
    return None if latest is None or latest.accepted_in == NO_BALLOT else latest.accepted


def agreeable(members: Sequence[int], doubts: Mapping[int, Collection[int]]) -> list[int]:
    """Return members of which none doubts another, in their order: those with the most doubts go first.

    Args:
        members: the candidates, by rank.
        doubts: by member, those that it does not reach.
    """
    left = list(members)
    while True:
        pairs = {frozenset((one, other)) for one in left for other in doubts.get(one, ()) if other in left}
        count = Counter(member for pair in pairs if len(pair) > 1 for member in pair)
        if not count:
            return left
        left.remove(max(left, key=lambda member: (count[member], left.index(member))))
