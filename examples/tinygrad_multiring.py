"""tinygrad on many ranks: an adapter in under 100 lines that passes the suite of docs/adapters.md.

examples/digits/with_tinygrad.py trains with it.
"""

from typing import Any

import numpy as np
from tinygrad import Tensor, dtypes

from multiring.frontend import array_collectives
from multiring.frontend.elastic.state import ObjectState
from multiring.frontend.lifecycle import rank
from multiring.frontend.object_collectives import allgather_object, broadcast_object
from multiring.frontend.process_sets import ProcessSet, global_process_set, members_of
from multiring.gradients.buckets import GradientSpec
from multiring.gradients.options import Options
from multiring.gradients.reducer import GradientReducer
from multiring.runtime.arrays import numpy_dtype


def to_numpy(tensor: Tensor) -> Any:
    """Return a tensor's elements; tinygrad would make float32 of bfloat16, which is ml_dtypes' here."""
    if tensor.dtype == dtypes.bfloat16:
        return tensor.bitcast(dtypes.uint16).numpy().view(numpy_dtype("bfloat16"))
    return tensor.numpy()


def from_numpy(array: Any, device: Any = None) -> Tensor:
    """Return a tensor of an array's elements."""
    if array.dtype == numpy_dtype("bfloat16"):
        return Tensor(np.array(array, order="C").view("uint16"), device=device).bitcast(dtypes.bfloat16).realize()
    return Tensor(array, device=device).realize()


def all_reduce(
    tensor: Tensor, op: str = "average", *, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Return every rank's tensor combined: "sum", "average", "min", "max" or "product"."""
    found = array_collectives.allreduce(to_numpy(tensor), op, name=name, process_set=process_set)
    return from_numpy(found, tensor.device)


def broadcast_parameters(parameters: list[Tensor], root: int = 0) -> None:
    """Give all ranks rank `root`'s parameters."""
    for each in parameters:
        each.assign(from_numpy(array_collectives.broadcast(to_numpy(each), root), each.device)).realize()


def distribute(optimizer: Any, process_set: ProcessSet = global_process_set) -> Any:
    """Return `optimizer`, whose steps take the average of all ranks' gradients."""
    plain_step = optimizer.step
    reducers: dict[Any, GradientReducer] = {}  # by membership: the ranks meet anew after a failure

    def reducer_now() -> GradientReducer:
        members = members_of(process_set)
        if members not in reducers:
            forms = [(value.dtype.name, value.shape) for value in map(to_numpy, optimizer.params)]
            specs = [(f"parameter {number}", GradientSpec.row_major(*form)) for number, form in enumerate(forms)]
            reducers[members] = GradientReducer(
                specs,
                members.group,
                Options(op="average"),
                parameters=lambda: [to_numpy(each) for each in optimizer.params],
            )
        return reducers[members]

    def step() -> None:
        own = [None if each.grad is None else to_numpy(each.grad) for each in optimizer.params]
        for each, shared in zip(optimizer.params, reducer_now().reduce(own), strict=True):
            # tinygrad's optimizers want a gradient of each parameter; where no rank has one, it is zero.
            gradient = np.zeros(each.shape, np.float32) if shared is None else shared.copy()
            each.grad = from_numpy(gradient, each.device)
        plain_step()

    optimizer.step = step
    return optimizer


class ModelState(ObjectState):
    """Parameters, and whatever else as attributes, to go on from after a failure."""

    def __init__(self, parameters: list[Tensor], **values: Any) -> None:
        self._parameters = parameters
        super().__init__(broadcast_object, rank, allgather_object, held=self._read(), **values)

    def _read(self) -> list[Any]:
        return [to_numpy(each) for each in self._parameters]

    def save(self) -> None:
        """Keep everything as it is now."""
        self.held = self._read()
        super().save()

    def restore(self) -> None:
        """Make everything what it was when it was kept last."""
        super().restore()
        for each, value in zip(self._parameters, self.held, strict=True):
            each.assign(from_numpy(value.copy(), each.device)).realize()

    def sync(self) -> None:
        """Make everything rank 0's on every rank, and keep it."""
        self.save()
        super().sync()
        self.restore()
