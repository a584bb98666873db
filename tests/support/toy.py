"""An adapter for a minimal framework, to show the cost of an adapter: arrays are immutable, gradients read-only.

A model is a dict of arrays. The optimizer takes all gradients at once (`Optimizer.step`, as in JAX) or one by one in
reverse order (`Optimizer.tape`, as in torch).
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from multiring._frontend.array_collectives import start_allreduce
from multiring._frontend.elastic.state import ObjectState
from multiring._frontend.handles import handle_of, synchronize
from multiring._frontend.lifecycle import rank
from multiring._frontend.object_collectives import allgather_object, broadcast_object
from multiring._frontend.process_sets import ProcessSet, global_process_set, members_of
from multiring._frontend.reduce_ops import Average
from multiring._gradients.buckets import BUCKET_BYTES, GradientSpec
from multiring._gradients.compression_state import packed, unpacked
from multiring._gradients.options import GradientOptions
from multiring._gradients.reducer import GradientReducer

Array = NDArray[Any]
Model = Mapping[str, Array]


# --- interop ---


def frozen(array: Array) -> Array:
    """Return `array` as an immutable array of the framework."""
    array = np.asarray(array)
    array.flags.writeable = False
    return array


# --- collectives ---


def allreduce_async(
    array: Array, name: str | None = None, op: int | str = Average, process_set: ProcessSet = global_process_set
) -> int:
    """Start a reduction of `array` over the ranks into a new array; return a handle."""
    return handle_of(start_allreduce(array, op, name=name, process_set=process_set))


def allreduce(array: Array, **keywords: Any) -> Array:
    """Return `array` reduced over the ranks."""
    return frozen(synchronize(allreduce_async(array, **keywords)))


# --- gradients ---


class Optimizer:
    """Gradient descent with gradients averaged over the ranks of a process set."""

    def __init__(self, model: Model, rate: float, process_set: ProcessSet = global_process_set, **options: Any) -> None:
        self._names = list(model)
        self._rate = rate
        members = members_of(process_set)
        self._group = members.group
        self._shapes = [model[name].shape for name in self._names]
        specs = [(name, GradientSpec.row_major(model[name].dtype.name, model[name].shape)) for name in self._names]
        chosen = GradientOptions(**{"op": "average", "bucket_bytes": BUCKET_BYTES, **options})
        self.reducer = GradientReducer(specs, members.group, chosen)
        members.reducers.add(self.reducer)

    def step(self, model: Model, gradients: Mapping[str, Array | None]) -> Model:
        """Return the model after a step, given all gradients at once."""
        return self._stepped(model, self.reducer.reduce([gradients.get(name) for name in self._names]))

    @contextmanager
    def tape(self, model: dict[str, Array]) -> Iterator["Optimizer"]:
        """Collect gradients one by one (`watch`) inside the block; at its end, `model` has made a step."""
        yield self
        model.update(self._stepped(model, self.reducer.finish()))

    def watch(self, name: str, gradient: Array) -> None:
        """Add a gradient as soon as it is computed."""
        self.reducer.bring(self._names.index(name), gradient)

    def _stepped(self, model: Model, shared: list[Array | None]) -> Model:
        pairs = zip(self._names, shared, strict=True)
        return {name: model[name] if each is None else frozen(model[name] - self._rate * each) for name, each in pairs}

    def state_dict(self) -> dict[str, Any]:
        """Return the state that one step passes to the next."""
        return packed(self.reducer.states(), self._group)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state from `state_dict`."""
        own = [each.residual is not None for each in self.reducer.states()]
        states = unpacked(state, own, self._shapes, self._group, lambda index: np.zeros(self._shapes[index], "f4"))
        self.reducer.load_states(dict(enumerate(states)))


# --- elastic state ---


class ModelState(ObjectState):
    """A model and other values, to resume from after a failure."""

    def __init__(self, **values: Any) -> None:
        super().__init__(broadcast_object, rank, allgather_object, **values)
