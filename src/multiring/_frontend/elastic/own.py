"""The parts of a state that differ between ranks: each rank commits its own, and a peer keeps a copy of it."""

import random
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from multiring.errors import ArgumentError


@dataclass(frozen=True, kw_only=True, slots=True)
class RankChange:
    """Where the ranks of a commit are now.

    Attributes:
        rank: this process's rank now.
        former: by present rank, its rank at the commit; None if it came in later.
        former_size: the number of ranks at the commit.
    """

    rank: int
    former: tuple[int | None, ...]
    former_size: int

    @property
    def size(self) -> int:
        """The number of ranks now."""
        return len(self.former)

    @property
    def gone(self) -> tuple[int, ...]:
        """The ranks at the commit that are not there any more."""
        return tuple(rank for rank in range(self.former_size) if rank not in self.former)

    @property
    def own(self) -> int | None:
        """This process's rank at the commit; None if it came in later."""
        return self.former[self.rank]


Rearranged = Callable[[Mapping[int, Any], RankChange], Any]


class OwnPart(Protocol):
    """A part of a state, of which each rank has its own."""

    is_vital: bool  # whether the training cannot go on without a rank's part

    def read(self) -> Any:
        """Return this rank's part; None if there is none at the moment. It is copied before it changes."""

    def write(self, values: Mapping[int, Any], change: RankChange) -> None:
        """Set this rank's part after a failure, or after the ranks have changed.

        Args:
            values: the committed parts, by rank at the commit; without those of ranks whose part is lost.
            change: where the ranks are now.
        """


class OwnValue:
    """A value of which each rank has its own, as an argument of a state.

        state = TorchState(model, optimizer, moments=OwnValue(moments, rearranged=divided_anew), epoch=0)

    The state's attribute is the value itself. `commit` keeps a copy of it on this rank, and one in another rank's
    memory, on another host if there is one. `sync` does not replace it by another rank's.

    Args:
        value: a value that can be pickled. Arrays of NumPy and tensors of torch are copied without pickling.
        rearranged: a function that returns this rank's value when the ranks have changed, given the values of all ranks
            at the last commit, by rank, and a RankChange. Without it each rank keeps its own value, a newcomer has the
            one that it was made with, and the values of lost ranks are dropped.

    Raises:
        ArgumentError: `rearranged` is no function.
    """

    def __init__(self, value: Any, rearranged: Rearranged | None = None) -> None:
        if rearranged is not None and not callable(rearranged):
            raise ArgumentError(f"OwnValue(rearranged={rearranged!r}): want a function of the values and a RankChange")
        self.value = value
        self.rearranged = rearranged


class OwnAttribute:
    """The `OwnPart` of an attribute that was given as an `OwnValue`."""

    def __init__(self, state: Any, name: str, rearranged: Rearranged | None) -> None:
        self._state, self._name, self._rearranged = state, name, rearranged
        self.is_vital = rearranged is not None

    def read(self) -> Any:
        """Return a tuple of the value, because None is a value, too."""
        return (getattr(self._state, self._name),)

    def write(self, values: Mapping[int, Any], change: RankChange) -> None:
        """Set the attribute."""
        is_same = change.former == tuple(range(change.former_size))
        if self._rearranged is not None and not is_same:
            setattr(self._state, self._name, self._rearranged({at: each for at, (each,) in values.items()}, change))
        elif change.own is not None and change.own in values:
            setattr(self._state, self._name, values[change.own][0])


class Randomness:
    """The random number generators of this rank, as an argument of a state: those of Python, NumPy and torch.

        state = TorchState(model, optimizer, randomness=Randomness(), epoch=0)

    After a failure they are as they were at the commit. A newcomer goes on with those of a rank that is gone.

    torch's generator of the CPU is one of them if the program has imported torch.
    """

    is_vital = False

    def __init__(self) -> None:
        self._left: list[Any] = []  # the generators of ranks that are gone, for newcomers

    def read(self) -> Any:
        """Return the generators' states, and those of ranks that are gone."""
        torch = _torch()
        own = random.getstate(), np.random.get_state(), None if torch is None else torch.get_rng_state()  # noqa: NPY002 -- programs use it
        return own, self._left

    def write(self, values: Mapping[int, Any], change: RankChange) -> None:
        """Set the generators."""
        # Newcomers take what is left in order; rank 0 keeps the rest.
        left = [each for rank in sorted(values) for each in values[rank][1]]
        left += [values[rank][0] for rank in change.gone if rank in values]
        newcomers = [rank for rank, former in enumerate(change.former) if former is None]
        taken = dict(zip(newcomers, left, strict=False))
        self._left = left[len(taken) :] if change.rank == 0 else []
        own = change.own
        found = values[own][0] if own is not None and own in values else taken.get(change.rank)
        if found is None:
            return
        python, numpy, torchs = found
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002 -- as above
        torch = _torch()
        if torch is not None and torchs is not None:
            torch.set_rng_state(torchs)


def _torch() -> Any:
    return sys.modules.get("torch")
