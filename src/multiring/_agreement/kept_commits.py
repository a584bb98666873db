"""To which commit the ranks go back when each rank has a state of its own, and who has whose state of it.

A commit counts if each rank that is left has its own state of it, and of each other rank some rank has a whole copy. A
rank that came in later has none, and does not matter. States of which the loss can be borne need no copy.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class CommitPlace(NamedTuple):
    """A rank's place at a commit.

    rank: its rank then.
    holders: by rank, the rank that kept a copy of its state; None if no rank did.
    is_vital: whether the training cannot go on without a rank's own state.
    """

    rank: int
    holders: tuple[int | None, ...]
    is_vital: bool


class Kept(NamedTuple):
    """What one rank has.

    own: by commit number, its place at the commits of which it has its own state.
    copies: the numbers of commits and ranks of which it has whole copies.
    """

    own: Mapping[int, CommitPlace]
    copies: frozenset[tuple[int, int]]


@dataclass(frozen=True, kw_only=True, slots=True)
class CommitFound:
    """The commit to which the ranks go back.

    number: its number.
    former: by present rank, its rank at the commit; None if it came later.
    sources: by rank at the commit, the present rank that has its state.
    lost: the ranks at the commit whose state nobody has.
    """

    number: int
    former: tuple[int | None, ...]
    sources: Mapping[int, int]
    lost: tuple[int, ...]


class LostStatesError(Exception):
    """Of no commit the own states of all ranks are left; the text names the ranks of the last one."""


def commit_found(kept: Sequence[Kept]) -> CommitFound | None:
    """Return the last commit that counts; None if nobody has committed.

    Args:
        kept: what each present rank has.

    Raises:
        LostStatesError: no commit counts.
    """
    numbers = sorted({number for each in kept for number in each.own}, reverse=True)
    why = ""
    for number in numbers:
        # A rank all of whose commits are later came in later.
        if any(number not in each.own and min(each.own, default=number + 1) < number for each in kept):
            continue
        places = [each.own.get(number) for each in kept]
        place = next(each for each in places if each is not None)
        sources = {
            there: rank for rank, each in reversed(list(enumerate(kept))) for at, there in each.copies if at == number
        }
        sources |= {each.rank: rank for rank, each in enumerate(places) if each is not None}
        lost = tuple(rank for rank in range(len(place.holders)) if rank not in sources)
        if not lost or not place.is_vital:
            former = tuple(None if each is None else each.rank for each in places)
            return CommitFound(number=number, former=former, sources=sources, lost=lost)
        why = why or _told(lost, place.holders)
    if numbers:
        raise LostStatesError(why or f"no rank that is left has its own state of commit {numbers[-1]}")
    return None


def _told(lost: Sequence[int], holders: Sequence[int | None]) -> str:
    names = ", ".join(
        f"of rank {rank} (no rank kept a copy)"
        if holders[rank] is None
        else f"of rank {rank} (copy on rank {holders[rank]})"
        for rank in lost
    )
    return (
        f"the own states {names} are lost: of the {len(holders)} ranks at the last commit, ranks were lost at once "
        "with those that had their copies"
    )
