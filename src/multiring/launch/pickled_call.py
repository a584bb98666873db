"""What `run_function` sends to its ranks, and what comes back: pickles in a folder of this user's own."""

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
    """What the function returned on a rank."""

    value: Any


@dataclass(frozen=True, slots=True)
class Failure:
    """What it raised: the traceback's text, and the error where that can be pickled.

    `is_consequence`: it was raised because another rank is gone.
    """

    text: str
    error: BaseException | None
    is_consequence: bool


Outcome = Returned | Failure


class CallFolder:
    """The folder. One process sends, then each rank opens it and leaves its outcome."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def send(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Put the call into the folder, with the path on which this process finds modules.

        Raises:
            ArgumentError: it cannot be pickled.
        """
        try:
            call = _dumps((func, args, kwargs))
        except Exception as error:
            hint = "" if _has_cloudpickle() else "; pip install cloudpickle, which can send more than pickle"
            raise ArgumentError(
                f"{func!r} or its arguments cannot be sent to other processes: {error}{hint}"
            ) from error
        # Two pickles, as the second may need modules that are found by the first.
        (self._folder / _FUNCTION).write_bytes(pickle.dumps(sys.path) + call)

    def call(self) -> Any:
        """Return what the function returns."""
        with (self._folder / _FUNCTION).open("rb") as file:
            sys.path += [entry for entry in pickle.load(file) if entry not in sys.path]  # noqa: S301 -- from `send`
            func, args, kwargs = pickle.load(file)  # noqa: S301 -- from `send`, by the same user
        return func(*args, **kwargs)

    def leave(self, rank: int, outcome: Outcome) -> None:
        """Leave a rank's outcome: whole, or not at all."""
        draft = self._folder / f"draft-{rank}"
        draft.write_bytes(_dumps(outcome))
        draft.rename(self._folder / f"rank-{rank}")

    def outcomes(self, ranks: int) -> Sequence[Outcome | None]:
        """Return each rank's outcome, None where it left none."""
        files = [self._folder / f"rank-{rank}" for rank in range(ranks)]
        return [pickle.loads(file.read_bytes()) if file.exists() else None for file in files]  # noqa: S301 -- from `leave`


def failure_of(error: BaseException) -> Failure:
    """Return `error` as it is told to the process that asked; without the error itself where that cannot be sent."""
    text = "".join(traceback.format_exception(error)).rstrip()
    is_consequence = any(isinstance(each, (PeerLostError, RendezvousError)) for each in _causes(error))
    try:
        pickle.loads(_dumps(error))  # noqa: S301 -- made here: some errors can be written and not read
    except Exception:  # noqa: BLE001 -- pickling raises what it likes
        return Failure(text, None, is_consequence)
    return Failure(text, error, is_consequence)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _has_cloudpickle() -> bool:
    return find_spec("cloudpickle") is not None


def _dumps(value: Any) -> bytes:
    """Pickle `value`, also functions that no other process finds by their name, where cloudpickle is there for it.

    Raises:
        Exception: whatever pickling it raises.
    """
    if _has_cloudpickle():
        return bytes(import_module("cloudpickle").dumps(value))
    if isinstance(value, tuple) and getattr(value[0], "__module__", None) == "__main__":
        raise pickle.PicklingError("it is defined in __main__, which is another program there")
    return pickle.dumps(value)
