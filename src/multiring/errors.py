"""The kinds of error a caller can act on; each says whether its Group is still usable.

`group_usable` is True where the error was found before any input was overwritten: inputs are
intact and the next operation on the Group works. It is False where a peer is gone or silent:
buffers of the operations in flight are undefined and the Group raises from then on.
"""

from collections.abc import Mapping
from typing import ClassVar


class MultiringError(Exception):
    """Base of every error multiring raises on purpose; anything else is a bug."""

    group_usable: ClassVar[bool] = True


class ArgumentError(MultiringError, ValueError):
    """An argument is wrong on this rank alone; nothing was sent."""


class DataError(MultiringError, ValueError):
    """A file of a data set is damaged, cut short, dangerous, or not what it is said to be."""


class SourceTimeoutError(DataError, TimeoutError):
    """Where a data set is stored did not answer within the time allowed."""


class ScheduleError(ArgumentError):
    """A schedule is malformed or does not do what its collective promises."""


class UnsupportedError(MultiringError, NotImplementedError):
    """What was asked for is sound, but this version, system or device cannot do it."""


class MismatchError(MultiringError, ValueError):
    """Ranks called one operation with different arguments; raised on every rank of the group.

    `titles` says what each rank of the group called it.
    """

    def __init__(self, text: str, titles: Mapping[int, str] | None = None) -> None:
        super().__init__(text)
        self.titles = dict(titles or {})


# What the ranks must agree on of a named operation: pairs of what is meant and its value, in the order of checking.
Signature = tuple[tuple[str, str], ...]


class DisagreementError(MismatchError):
    """Ranks came to one named operation with different signatures; raised on every rank of the set, inputs intact.

    `signatures` says by rank of the set what each came with: pairs of what is meant and its value, in the order of
    checking.
    """

    def __init__(self, text: str, signatures: Mapping[int, Signature] | None = None) -> None:
        super().__init__(text)
        self.signatures = dict(signatures or {})


class StateError(MultiringError, RuntimeError):
    """The call does not fit the moment: before `init`, after `shutdown`, after a fork, twice."""


class RendezvousError(MultiringError, RuntimeError):
    """The ranks did not find each other: one is missing, has another secret or another version."""

    group_usable = False


class PeerLostError(MultiringError, ConnectionError):
    """A rank of the group died, left, or broke its connection; buffers in flight are undefined."""

    group_usable = False


class StallError(MultiringError, TimeoutError):
    """A rank did not take part within the time allowed; buffers in flight are undefined."""

    group_usable = False


class LaunchError(MultiringError, RuntimeError):
    """A job could not be started as asked."""
