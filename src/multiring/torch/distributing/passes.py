"""Where a training is in the passes of its loader, kept so that a training can go on in the middle of one."""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from multiring._frontend.lifecycle import rank
from multiring._frontend.object_collectives import broadcast_object
from multiring.errors import ArgumentError
from multiring.torch.distributing.draws import raise_failure_of_rank_0, require_indices, words_of_failure

Batches = tuple[tuple[Any, ...], ...]
_FORMAT = 1
_MOST_TIMES = 10  # a sampler that draws so many times as many batches as its length may never end


class PassRecord:
    """The pass of a loader in which a training is, and how many of its batches were handed out.

    Rank 0 draws a pass as a whole, and every rank keeps it. So the training goes on with the rest of it whichever ranks
    are lost.

    Args:
        loader: the loader of one process, with the sampler and its random number generators.

    Attributes:
        together: the number of batches of this loader that form one global batch.
        drops_last: whether an incomplete global batch at the end of a pass is left out.
    """

    together = 1
    drops_last = False

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader
        self._number = 0  # of finished passes
        self._done = 0  # batches of the current pass that were handed out; those of this loader, not global ones
        self._batches: Batches | None = None  # of the current pass; None: it is not drawn yet
        self._random = self._states()  # of the sampler's generators on rank 0 when the pass was drawn

    @property
    def number(self) -> int:
        """The number of finished passes."""
        return self._number + self._is_at_end

    @property
    def _is_at_end(self) -> bool:
        return self._batches is not None and self._left < (self.together if self.drops_last else 1)

    @property
    def _left(self) -> int:
        return 0 if self._batches is None else len(self._batches) - self._done

    def rest(self, batches: Iterable[Sequence[Any]]) -> Iterator[Sequence[Any]]:
        """Yield the batches that are left of the current pass, or those of the next one; every rank must call it.

        Args:
            batches: the batches of a pass; only rank 0 draws them.

        Raises:
            MismatchInternalError: rank 0 could not draw the batches. Rank 0 raises its own error.
        """
        if self._is_at_end:
            self.end()
        if self._batches is None:
            self._draw(batches)
        else:
            self._set_states()
        yield from self._batches[self._done :] if self._batches is not None else ()

    def hand_out(self) -> None:
        """Count a global batch that the program gets."""
        self._done += min(self.together, self._left)

    def end(self) -> None:
        """Count the pass as finished."""
        self._number, self._done, self._batches = self._number + 1, 0, None

    def _draw(self, source: Iterable[Sequence[Any]]) -> None:
        batches: Batches = ()
        failure: Exception | None = None
        if rank() == 0:
            try:
                batches = tuple(tuple(each) for each in islice(source, self._most + 1))
                _require_batches(batches, self._most)
            except Exception as error:  # noqa: BLE001 -- raised when the other ranks know of it
                failure = error
        told, batches, random = broadcast_object(
            (words_of_failure(failure), batches, self._states()), 0, name="distribute.pass"
        )
        raise_failure_of_rank_0(failure, told, "the pass")
        self._batches, self._done, self._random = batches, 0, random

    def _states(self) -> list[Any]:
        return [each.get_state() for each in _generators(self._loader)]

    def _set_states(self) -> None:
        for generator, state in zip(_generators(self._loader), self._random, strict=True):
            generator.set_state(state)

    @property
    def _most(self) -> int:
        batches: Any = self._loader.batch_sampler
        return _MOST_TIMES * (len(batches) + 1)

    def state_dict(self) -> dict[str, Any]:
        """Return the place in the passes; the same on all ranks."""
        told: dict[str, Any] = {"format": _FORMAT, "samples": _length(self._loader), "random": self._random}
        if self._is_at_end:
            return told | {"passes": self._number + 1, "done": 0, "batches": None}
        return told | {"passes": self._number, "done": self._done, "batches": self._batches}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a place in the passes, in the next iteration.

        Raises:
            ArgumentError: `state` is no result of `state_dict`, or of a data set of another length.
        """
        names = {"format", "samples", "random", "passes", "done", "batches"}
        if set(state) != names or state["format"] != _FORMAT:
            raise ArgumentError(f"state of a loader with {sorted(state)}: want a result of its state_dict")
        if state["samples"] != _length(self._loader):
            raise ArgumentError(
                f"the state is of a data set of {state['samples']} samples, and this one has {_length(self._loader)}: "
                "want the data set with which the training began"
            )
        if len(state["random"]) != len(self._random):
            raise ArgumentError(
                f"the state has {len(state['random'])} random number generators of a sampler, and this loader has "
                f"{len(self._random)}: want the loader with which the training began"
            )
        self._number, self._done, self._batches = state["passes"], state["done"], state["batches"]
        self._random = list(state["random"])
        if self._batches is None:
            self._set_states()


def require_passes(loader: DataLoader[Any], *, sharded: bool) -> None:
    """Raise ArgumentError if the place of a loader in its passes cannot be kept."""
    if sharded:
        raise ArgumentError(
            "the place of a loader of distribute(sharded=True) cannot be kept, because each rank has samples of its "
            "own, which nobody reads once it is lost: want sharded=False; or keep each rank's place in the program"
        )
    if isinstance(loader.dataset, IterableDataset):
        raise ArgumentError(
            f"the place in an iterable data set, {type(loader.dataset).__name__}, cannot be kept: want a map-style "
            "data set, or a multiring.torch.DataLoader"
        )
    try:
        len(loader)
    except TypeError as error:
        raise ArgumentError(
            f"the place in a pass of {type(loader.batch_sampler).__name__} cannot be kept, because each pass is drawn "
            f"as a whole, and this one may never end ({error}): want a sampler with a length"
        ) from None


def _require_batches(batches: Batches, most: int) -> None:
    if len(batches) > most:
        raise ArgumentError(
            f"the loader's batch sampler drew more than {most} batches in a pass, {_MOST_TIMES} times as many as its "
            "length: want a sampler that ends, because a pass is drawn as a whole if a state keeps the loader's place"
        )
    for each in batches:
        require_indices(each)


def _length(loader: DataLoader[Any]) -> int | None:
    return len(loader.dataset) if isinstance(loader.dataset, Sized) else None


def _generators(loader: DataLoader[Any]) -> list[torch.Generator]:
    """Return the generators from which a pass is drawn, each once."""
    batches = loader.batch_sampler
    holders = [loader, loader.sampler, batches, getattr(batches, "sampler", None)]
    found = [getattr(each, "generator", None) for each in holders]
    return list({id(each): each for each in found if isinstance(each, torch.Generator)}.values())
