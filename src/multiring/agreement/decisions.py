"""What a group decides about its named operations, and what comes of an event at one rank."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Ready:
    """All ranks have come to the operation, with the same terms, or have joined: it runs now."""

    name: str
    terms: str
    joined: int  # ranks that did not come: they have joined


@dataclass(frozen=True, slots=True)
class Refused:
    """Ranks came to the operation with different terms: it does not run, and may be announced anew."""

    name: str
    terms: Mapping[int, str]  # by rank: the first few of those that are known to have said each
    counts: Mapping[str, int]  # by terms: how many ranks are known to have said so


@dataclass(frozen=True, slots=True)
class Joined:
    """All ranks have joined; nothing is in flight, and everything begins anew."""

    last_rank: int


@dataclass(frozen=True, slots=True)
class Missing:
    """The answer to an inquiry: whom the operations wait for that are announced and not decided."""

    names: Mapping[str, tuple[int, ...]]  # the ranks that have not come to each
    blocked: Mapping[int, str]  # what those of them are blocked on that are blocked on an operation
    unjoined: tuple[int, ...]  # where ranks have joined: those that have not
    silent: tuple[int, ...]  # ranks that did not answer in time; nothing is known of the ranks below them


@dataclass(frozen=True, slots=True)
class Deadlock:
    """Follows the Missing that shows it: operations that wait for ranks that wait for each other. They do not run."""

    blocked: Mapping[int, str]  # what each rank is blocked on that waits for one of them
    names: Mapping[str, tuple[int, ...]]  # each of them, and the ranks that have not come to it


@dataclass(frozen=True, slots=True)
class Lost:
    """A rank is gone: nothing will be decided any more. The last decision; ranks may have heard fewer before it."""

    rank: int


@dataclass(frozen=True, slots=True)
class Silent:
    """An inquiry of this rank, or of one below it in the tree, gets no answer because of a rank that sends nothing."""

    rank: int


Decision = Ready | Refused | Joined | Missing | Deadlock | Lost
Note = Refused | Deadlock | Lost | Silent


@dataclass(slots=True)
class Outcome:
    """What comes of an event at one rank.

    `messages` are to be sent: (to rank, bytes), in this order to each rank. `decisions` are the group's, in its order,
    the same on every rank. `notes` concern this rank alone: an operation that it came to had been decided against
    before it came (see `Member.announce`), or an inquiry gets no answer.
    """

    messages: list[tuple[int, bytes]] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
