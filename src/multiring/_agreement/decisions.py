"""The decisions of a group on named operations, and the outcome of an event."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Ready:
    """The operation runs now: all ranks have announced it or have joined.

    The announcing ranks have the same terms.
    """

    name: str
    terms: str
    joined: int  # the number of ranks that did not announce it, because they have joined


@dataclass(frozen=True, slots=True)
class Refused:
    """The operation does not run, because ranks announced it with different terms.

    The ranks may announce the operation again.
    """

    name: str
    terms: Mapping[int, str]  # the terms by rank, for the first few ranks with each terms
    counts: Mapping[str, int]  # for each terms, the number of ranks known to have announced these terms


@dataclass(frozen=True, slots=True)
class Joined:
    """All ranks have joined.

    No operation is in flight, and all ranks may announce operations again.
    """

    last_rank: int


@dataclass(frozen=True, slots=True)
class Missing:
    """The answer to an inquiry: the ranks for which undecided operations wait."""

    names: Mapping[str, tuple[int, ...]]  # for each operation, the ranks that have not announced it
    blocked: Mapping[int, str]  # for each blocked rank in `names`, the operation on which it is blocked
    unjoined: tuple[int, ...]  # the ranks that have not joined; empty if no rank has joined
    silent: tuple[int, ...]  # the ranks that did not answer in time; the ranks below them are unknown


@dataclass(frozen=True, slots=True)
class Deadlock:
    """Operations that do not run, because their ranks wait for each other.

    A Missing with the evidence precedes this decision.
    """

    blocked: Mapping[int, str]  # for each waiting rank, the operation on which it is blocked
    names: Mapping[str, tuple[int, ...]]  # for each operation of the deadlock, the ranks that have not announced it


@dataclass(frozen=True, slots=True)
class Lost:
    """A rank is lost; this is the last decision.

    Some ranks may have received fewer decisions before it than others.
    """

    rank: int


@dataclass(frozen=True, slots=True)
class Silent:
    """An inquiry gets no answer, because `rank` is silent.

    The inquiry is from this rank or from a rank below it in the tree.
    """

    rank: int


Decision = Ready | Refused | Joined | Missing | Deadlock | Lost
Note = Refused | Deadlock | Lost | Silent


@dataclass(slots=True)
class AgreementOutcome:
    """The outcome of an event at one rank.

    `messages` are pairs (receiving rank, bytes), which the caller must send in this order. `decisions` are decisions of
    the group, in the same order on every rank. `notes` concern this rank alone: an operation was refused before this
    rank announced it (see `Member.announce_all`), or an inquiry gets no answer.
    """

    messages: list[tuple[int, bytes]] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
