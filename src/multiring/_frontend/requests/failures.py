"""Pass the error of a request through native code, and find it again in the error that the framework raises."""

import itertools
import threading
from collections import deque

from multiring.errors import (
    ArgumentError,
    MismatchError,
    MultiringError,
    PeerLostError,
    StallError,
    StateError,
    UnsupportedError,
)

OK, CANCELLED, INTERNAL = 0, 7, 8
_ARGUMENT = 1
_KINDS: tuple[tuple[type[Exception], int], ...] = (
    (ArgumentError, _ARGUMENT),
    (MismatchError, 2),
    (PeerLostError, 3),
    (StallError, 4),
    (UnsupportedError, 6),  # first, because an error may be both an UnsupportedError and a StateError
    (StateError, 5),
)
_TRACING = "StagingError"  # TensorFlow's error for an error of multiring during tracing
_KEPT = 256  # the number of latest errors that can be found again


class _Failures:
    """The latest errors of this process's requests, by the number in their texts."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.numbers = itertools.count(1)
        self.kept: deque[tuple[str, Exception]] = deque(maxlen=_KEPT)


_failures = _Failures()


def noted(error: BaseException) -> tuple[int, str]:
    """Store an error for `error_of`; return the number of its kind in multiring.h, and a text.

    `error_of` finds the error by this text.
    """
    kind = next((kind for each, kind in _KINDS if isinstance(error, each)), INTERNAL)
    if getattr(error, "is_argument", False):
        kind = _ARGUMENT
    with _failures.lock:
        number = f"[multiring error {next(_failures.numbers)}]"
        if isinstance(error, Exception):
            _failures.kept.append((number, error))
    return kind, f"{type(error).__name__}: {error} {number}"


def error_of(exception: BaseException) -> Exception | None:
    """Return multiring's error: `exception` itself, or the error that caused a framework's exception.

    The result is None if there is no such error, or if many errors have occurred since.
    """
    if isinstance(exception, MultiringError):
        return exception
    found, cause = noted_error(exception), exception.__cause__
    return cause if found is None and isinstance(cause, MultiringError) else found  # torch.distributed sets the cause


def noted_error(exception: BaseException) -> Exception | None:
    """Return the error of a request that a framework's exception quotes, or None."""
    text = str(exception)
    with _failures.lock:
        found = next((error for number, error in _failures.kept if number in text), None)
    if found is None and type(exception).__name__ == _TRACING:
        cause = exception.__cause__ or exception.__context__
        return cause if isinstance(cause, MultiringError) else None if cause is None else noted_error(cause)
    return found
