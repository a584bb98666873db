"""The state of a member of a population, as it goes to another member's rank."""

import importlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from multiring._frontend.elastic.snapshot import Outline, value_in
from multiring._runtime import Group, Handle
from multiring.errors import ArgumentError, MultiringError, PeerLostError, StateError

_WANTED = "want objects with state_dict and load_state_dict, or NumPy arrays"


class StateCopies:
    """Sends and receives states on this rank.

    Args:
        group: the group of all ranks, in which nothing else sends messages meanwhile.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._sending: list[Handle] = []
        self._room = np.empty(0, np.uint8)  # what is being sent
        _know_tensors()  # so that the first copy does not wait for an import

    def check(self, state: Any) -> None:
        """Refuse a state that cannot be copied.

        Raises:
            ArgumentError: the text names the part.
        """
        if not isinstance(state, Mapping) or not state:
            raise ArgumentError(f"exchange(state={state!r}): want a dict; {_WANTED}")
        for name, each in state.items():
            is_object = callable(getattr(each, "state_dict", None)) and callable(getattr(each, "load_state_dict", None))
            if not is_object and not isinstance(each, np.ndarray):
                raise ArgumentError(f"exchange: state[{name!r}] is of type {type(each).__name__}; {_WANTED}")

    def send(self, state: Mapping[str, Any], ranks: Sequence[int]) -> None:
        """Copy the state, and start to send it to these ranks. The state may change when the call returns.

        Raises:
            Exception: as `state_dict` and pickling do. The ranks that wait for the state hear of it.
        """
        self.finish()
        if not ranks:
            return
        try:
            outline = Outline({name: _taken(each) for name, each in state.items()})
        except Exception as error:
            for rank in ranks:
                self._group.calls.decline_message("send", self._group.rank, rank, 0, error)
            raise
        size = outline.size_bytes
        if len(self._room) < size:
            self._room = np.empty(size, np.uint8)
        outline.copy_into(self._room)
        for rank in ranks:
            self._sending.append(self._group.send_async(np.array([size]), rank))
            self._sending.append(self._group.send_async(self._room[:size], rank))

    def receive(self, state: Mapping[str, Any], source: int, who: str) -> None:
        """Overwrite the state by that of another rank.

        Args:
            state: the objects to load.
            source: the rank.
            who: its name in errors.

        Raises:
            PeerLostError, StateError: the state did not come.
            ArgumentError: it does not fit.
        """
        _know_tensors()
        try:
            size = np.zeros(1, np.int64)
            self._group.recv(size, source)
            room = np.empty(int(size[0]), np.uint8)
            self._group.recv(room, source)
        except MultiringError as error:
            kind = PeerLostError if isinstance(error, PeerLostError) else StateError
            raise kind(f"the state of {who} did not come: {error}") from error
        # The arrays of the value are in `room`, which nothing else uses: optimizers keep what they load.
        found = value_in(room, shares=True)
        if set(found) != set(state):
            raise ArgumentError(f"the state of {who} has {sorted(found)}, and that of this member {sorted(state)}")
        for name, each in state.items():
            try:
                _load(each, found[name])
            except Exception as error:
                raise ArgumentError(
                    f"state[{name!r}] of {who} does not fit: {type(error).__name__}: {error}; all members of a "
                    "population want the same shapes"
                ) from error

    def finish(self) -> None:
        """Wait until all that was sent has gone."""
        for handle in self._sending:
            handle.wait()
        self._sending.clear()


def _taken(part: Any) -> Any:
    _know_tensors()
    return part if isinstance(part, np.ndarray) else part.state_dict()


def _load(part: Any, value: Any) -> None:
    if not isinstance(part, np.ndarray):
        part.load_state_dict(value)
    elif part.shape != value.shape or part.dtype != value.dtype:
        raise ArgumentError(f"it is {value.dtype} of shape {value.shape}, not {part.dtype} of shape {part.shape}")
    else:
        part[...] = value


def _know_tensors() -> None:
    """Have tensors of torch go as they are, without being pickled, if the program uses torch."""
    if "torch" in sys.modules:
        importlib.import_module("multiring.torch.elastic.own")  # it registers itself
