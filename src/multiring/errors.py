"""The errors that a caller can handle.

Each class says whether its Group is still usable. `group_usable` is True if the error was detected before any input was
overwritten. Then the inputs are intact, and the next operation on the Group works. The attribute is False if a peer is
lost or silent. Then the buffers of the operations in flight are undefined, and every later operation on the Group
raises.
"""

from collections.abc import Mapping
from typing import ClassVar

__all__ = [
    "ArgumentError",
    "CollectiveError",
    "DataError",
    "DisagreementError",
    "LaunchError",
    "MismatchError",
    "MultiringError",
    "PeerLostError",
    "RendezvousError",
    "ScheduleError",
    "Signature",
    "SourceTimeoutError",
    "StallError",
    "StateError",
    "UnsupportedError",
]


class MultiringError(Exception):
    """The base class of all errors that multiring raises on purpose.

    Any other exception is a bug.
    """

    group_usable: ClassVar[bool] = True


class ArgumentError(MultiringError, ValueError):
    """An argument on this rank is wrong; nothing was sent."""


class DataError(MultiringError, ValueError):
    """A file of a data set is damaged, truncated, dangerous, or of the wrong kind."""


class SourceTimeoutError(DataError, TimeoutError):
    """The storage of a data set did not answer within the time allowed."""


class ScheduleError(ArgumentError):
    """A schedule is malformed, or does not compute its collective."""


class UnsupportedError(MultiringError, NotImplementedError):
    """The request is valid, but this version, system or device does not support it."""


class CollectiveError(MultiringError, RuntimeError):
    """An operation of several ranks failed, on every rank that took part and is alive.

    It is the base class of all such errors. Its subclasses say why: the ranks' calls differ, a rank is lost, or a rank
    is silent. An adapter's operation also raises one for a call that all ranks made at the wrong time, or that is not
    supported. Horovod's name for this class is HorovodInternalError.
    """

    group_usable = False


class MismatchError(CollectiveError, ValueError):
    """Ranks called an operation with different arguments.

    Every rank of the group raises. `titles` gives, by rank of the group, each rank's description of the operation.
    """

    group_usable = True

    def __init__(self, text: str, titles: Mapping[int, str] | None = None) -> None:
        super().__init__(text)
        self.titles = dict(titles or {})


Signature = tuple[tuple[str, str], ...]
"""What the ranks of a named operation must agree on: pairs (property, value), in the order of checking."""


class DisagreementError(MismatchError):
    """Ranks submitted a named operation with different signatures.

    Every rank of the set raises; inputs are intact. `signatures` gives, by rank of the set, each rank's pairs
    (property, value), in the order of checking.
    """

    def __init__(self, text: str, signatures: Mapping[int, Signature] | None = None) -> None:
        super().__init__(text)
        self.signatures = dict(signatures or {})


class StateError(MultiringError, RuntimeError):
    """The call is not allowed at this time.

    For example, it comes before `init`, after `shutdown`, after a fork, or a second time.
    """


class RendezvousError(MultiringError, RuntimeError):
    """The ranks did not find each other.

    For example, a rank is missing, or has another secret or version.
    """

    group_usable = False


# OSError's subclasses come first, because OSError creates its own objects.
class PeerLostError(ConnectionError, CollectiveError):
    """A rank of the group died, left, or broke its connection.

    Buffers in flight are undefined.
    """


class StallError(TimeoutError, CollectiveError):
    """A rank did not take part within the time allowed.

    Buffers in flight are undefined.
    """


class LaunchError(MultiringError, RuntimeError):
    """A job could not be started as requested."""
