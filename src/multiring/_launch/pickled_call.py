"""Exchange a call and its results between a calling process and its ranks.

The call and the results are pickles: in a private folder of this host, or in messages of a cluster's framework.
"""

import io
import os
import pickle
import struct
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

from multiring.errors import ArgumentError, MultiringError, PeerLostError, RendezvousError

_FUNCTION = "function"
_REFUSAL = "refusal"
FILES = "files:"  # begins the argument of `function_rank` that names the descriptors of CallFiles
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Returned:
    """The value that the function returned on a rank."""

    value: Any


@dataclass(frozen=True, slots=True)
class Failure:
    """The exception that the function raised on a rank.

    `text` is the traceback. `error` is the exception, or None if it cannot be pickled, or cannot be unpickled in this
    process. `is_consequence` means that the rank failed because it lost another rank.
    """

    text: str
    error: BaseException | None
    is_consequence: bool

    def __reduce__(self) -> tuple[Callable[..., "Failure"], tuple[str, bytes | None, bool]]:
        # The error is a pickle of its own: a caller that cannot unpickle it must still get the text.
        error = None if self.error is None else _dumps(self.error)
        return _unpickled_failure, (self.text, error, self.is_consequence)


def _unpickled_failure(text: str, data: bytes | None, is_consequence: bool) -> Failure:  # noqa: FBT001 -- for pickle
    try:
        error = None if data is None else pickle.loads(data)  # noqa: S301 -- from a rank of the job
    except Exception as wrong:  # noqa: BLE001 -- unpickling can raise any exception
        error = None
        text += f"\n(this error cannot be unpickled in the calling process: {type(wrong).__name__}: {wrong})"
    return Failure(text, error, is_consequence)


Outcome = Returned | Failure


class CallFolder:
    """The folder of a call.

    The calling process writes the call, then each rank reads it and writes its outcome.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def send(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Write the call into the folder, together with this process's `sys.path`.

        Raises:
            ArgumentError: the function or its arguments cannot be pickled.
        """
        (self._folder / _FUNCTION).write_bytes(pickled_call(func, args, kwargs))

    def call(self) -> Any:
        """Read the call from the folder, call the function, and return its result."""
        return call_pickled(self.content)

    def refuse(self, error: MultiringError) -> None:
        """Write the error for which the launcher did not start the ranks."""
        (self._folder / _REFUSAL).write_bytes(pickled_outcome(error))

    @property
    def refusal(self) -> MultiringError | None:
        """The error for which the launcher did not start the ranks, or None."""
        file = self._folder / _REFUSAL
        return cast("MultiringError", outcome_of(file.read_bytes())) if file.exists() else None

    def leave(self, rank: int, outcome: Outcome) -> None:
        """Write a rank's outcome to the folder atomically."""
        draft = self._folder / f"draft-{rank}"
        draft.write_bytes(pickled_outcome(outcome))
        draft.rename(self._folder / f"rank-{rank}")

    @property
    def content(self) -> bytes:
        """The call, for `CallFiles.create`."""
        return (self._folder / _FUNCTION).read_bytes()

    def take(self, rank: int, written: bytes) -> None:
        """Write the outcome of a rank on another host; `written` is what it has written by `CallFiles.leave`."""
        if (outcome := _complete(written)) is not None:
            (self._folder / f"rank-{rank}").write_bytes(outcome)

    def outcomes(self, ranks: int) -> Sequence[bytes | None]:
        """Return the pickled outcome of each rank; None for a rank that has written no outcome."""
        files = [self._folder / f"rank-{rank}" for rank in range(ranks)]
        return [file.read_bytes() if file.exists() else None for file in files]


class CallFiles:
    """The two files of a call on one rank: the call, and the rank's outcome.

    Both are open descriptors of files without a name, so no ending can leave them behind.
    """

    def __init__(self, call: int, outcome: int) -> None:
        self._call, self._outcome = call, outcome

    @classmethod
    def create(cls, call: bytes) -> "CallFiles":
        """Create the files, with `call` (of `pickled_call`) in the first."""
        return cls(unnamed_file(call), unnamed_file(b""))

    @classmethod
    def sharing(cls, call: int) -> "CallFiles":
        """Create the files of a rank whose call is in the file with descriptor `call`, which other ranks read, too."""
        return cls(os.dup(call), unnamed_file(b""))

    @classmethod
    def inherited(cls, text: str) -> "CallFiles":
        """Return the files whose descriptors this process has inherited; `text` is the creator's `str`."""
        call, outcome = text.split(",")
        return cls(int(call), int(outcome))

    def __str__(self) -> str:
        return f"{self._call},{self._outcome}"

    @property
    def descriptors(self) -> tuple[int, int]:
        """The descriptors, for `Popen(pass_fds=)`."""
        return self._call, self._outcome

    def call(self) -> Any:
        """Read the call, call the function, and return its result."""
        return call_pickled(content_of(self._call))

    def leave(self, _rank: int, outcome: Outcome) -> None:
        """Write the rank's outcome. A length before it shows whether it is complete."""
        data = pickled_outcome(outcome)
        with open(self._outcome, "wb", closefd=False) as file:
            file.write(_LENGTH.pack(len(data)) + data)

    def outcome(self) -> bytes | None:
        """Return the pickled outcome, or None if the rank has not written a complete outcome."""
        return _complete(self.written())

    def written(self) -> bytes:
        """Return what the rank has written so far, for `CallFolder.take`."""
        return content_of(self._outcome)

    def close(self) -> None:
        """Close both descriptors."""
        for descriptor in self.descriptors:
            os.close(descriptor)


def _complete(written: bytes) -> bytes | None:
    """Return the outcome in what a rank has written, or None if it is incomplete."""
    if len(written) < _LENGTH.size or len(written) - _LENGTH.size < _LENGTH.unpack_from(written)[0]:
        return None
    return written[_LENGTH.size :]


def unnamed_file(content: bytes) -> int:
    """Return the descriptor of a new file in memory, which has no name. The caller closes it."""
    descriptor = os.memfd_create("multiring-call")
    with open(descriptor, "wb", closefd=False) as file:
        file.write(content)
    return descriptor


def content_of(descriptor: int) -> bytes:
    """Return a file's content. The descriptor's position, which processes share, is not used."""
    pieces, at = [], 0
    while piece := os.pread(descriptor, 1 << 24, at):
        pieces.append(piece)
        at += len(piece)
    return b"".join(pieces)


def pickled_call(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """Return the call as bytes for `call_pickled`, together with this process's `sys.path`.

    Raises:
        ArgumentError: the function or its arguments cannot be pickled.
    """
    try:
        call = _dumps((func, args, kwargs))
    except Exception as error:
        hint = "" if _has_cloudpickle() else "; pip install cloudpickle, which can send more than pickle"
        raise ArgumentError(f"{func!r} or its arguments cannot be sent to other processes: {error}{hint}") from error
    # Use two pickles, because loading the second may need modules on the path in the first.
    return pickle.dumps(sys.path) + call


def call_pickled(data: bytes, *first: Any) -> Any:
    """Call the function that `pickled_call` has made `data` from, and return its result.

    `first` are more arguments, before those of the call.
    """
    file = io.BytesIO(data)
    sys.path += [entry for entry in pickle.load(file) if entry not in sys.path]  # noqa: S301 -- from `pickled_call`
    func, args, kwargs = pickle.load(file)  # noqa: S301 -- from `pickled_call`, by the job's own user
    return func(*first, *args, **kwargs)


def pickled_outcome(outcome: object) -> bytes:
    """Return an outcome, or an end without an outcome, as bytes.

    Raises:
        Exception: the returned value cannot be pickled.
    """
    return _dumps(outcome)


def outcome_of(data: bytes) -> Outcome:
    """Return the outcome in bytes from `pickled_outcome`."""
    outcome: Outcome = pickle.loads(data)  # noqa: S301 -- from `pickled_outcome`, by a rank of the job
    return outcome


def failure_of(error: BaseException) -> Failure:
    """Return the Failure that describes `error` to the calling process.

    It contains `error` only if `error` can be pickled.
    """
    text = "".join(traceback.format_exception(error)).rstrip()
    is_consequence = any(isinstance(each, (PeerLostError, RendezvousError)) for each in _causes(error))
    try:
        pickle.loads(_dumps(error))  # noqa: S301 -- made here: some errors can be pickled but not unpickled
    except Exception:  # noqa: BLE001 -- pickling can raise any exception
        return Failure(text, None, is_consequence)
    return Failure(text, error, is_consequence)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _has_cloudpickle() -> bool:
    return find_spec("cloudpickle") is not None


def _dumps(value: Any) -> bytes:
    """Pickle `value` with cloudpickle if it is installed, because it can pickle functions that cannot be imported.

    Raises:
        Exception: `value` cannot be pickled.
    """
    if _has_cloudpickle():
        return bytes(import_module("cloudpickle").dumps(value))
    if isinstance(value, tuple) and getattr(value[0], "__module__", None) == "__main__":
        raise pickle.PicklingError("it is defined in __main__, which is a different module in the ranks")
    return pickle.dumps(value)
