"""Exchange a call and its results between `run_function` and its ranks.

The call and the results are pickles in a private folder.
"""

import pickle
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from multiring.errors import ArgumentError, PeerLostError, RendezvousError

_FUNCTION = "function"


@dataclass(frozen=True, slots=True)
class Returned:
    """The value that the function returned on a rank."""

    value: Any


@dataclass(frozen=True, slots=True)
class Failure:
    """The exception that the function raised on a rank.

    `text` is the traceback. `error` is the exception, or None if it cannot be pickled. `is_consequence` means that the
    rank failed because it lost another rank.
    """

    text: str
    error: BaseException | None
    is_consequence: bool


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
        try:
            call = _dumps((func, args, kwargs))
        except Exception as error:
            hint = "" if _has_cloudpickle() else "; pip install cloudpickle, which can send more than pickle"
            raise ArgumentError(
                f"{func!r} or its arguments cannot be sent to other processes: {error}{hint}"
            ) from error
        # Use two pickles, because loading the second may need modules on the path in the first.
        (self._folder / _FUNCTION).write_bytes(pickle.dumps(sys.path) + call)

    def call(self) -> Any:
        """Read the call from the folder, call the function, and return its result."""
        with (self._folder / _FUNCTION).open("rb") as file:
            sys.path += [entry for entry in pickle.load(file) if entry not in sys.path]  # noqa: S301 -- from `send`
            func, args, kwargs = pickle.load(file)  # noqa: S301 -- from `send`, by the same user
        return func(*args, **kwargs)

    def leave(self, rank: int, outcome: Outcome) -> None:
        """Write a rank's outcome to the folder atomically."""
        draft = self._folder / f"draft-{rank}"
        draft.write_bytes(_dumps(outcome))
        draft.rename(self._folder / f"rank-{rank}")

    def outcomes(self, ranks: int) -> Sequence[Outcome | None]:
        """Return the outcome of each rank; None for a rank that has written no outcome."""
        files = [self._folder / f"rank-{rank}" for rank in range(ranks)]
        return [pickle.loads(file.read_bytes()) if file.exists() else None for file in files]  # noqa: S301 -- from `leave`


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
