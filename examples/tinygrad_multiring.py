"""tinygrad on many ranks: an adapter in under 100 lines that passes the suite of docs/adapters.md.

examples/digits/with_tinygrad.py trains with it.
"""

from typing import Any

import numpy as np
from tinygrad import Tensor, dtypes

from multiring import adapters
from multiring.adapters import (
    GradientOptions,
    GradientReducer,
    GradientSpec,
    ProcessSet,
    global_process_set,
    numpy_dtype,
)
from multiring.adapters.elastic import ObjectState


def to_numpy(tensor: Tensor) -> Any:
    """Return a tensor's elements; bfloat16 becomes the type of ml_dtypes, where tinygrad alone would return float32."""
    if tensor.dtype == dtypes.bfloat16:
        return tensor.bitcast(dtypes.uint16).numpy().view(numpy_dtype("bfloat16"))
    return tensor.numpy()


def from_numpy(array: Any, device: Any = None) -> Tensor:
    """Return a tensor with an array's elements."""
    if array.dtype == numpy_dtype("bfloat16"):
        return Tensor(np.array(array, order="C").view("uint16"), device=device).bitcast(dtypes.bfloat16).realize()
    return Tensor(array, device=device).realize()


def all_reduce(
    tensor: Tensor, op: str = "average", *, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Return the ranks' tensors combined: "sum", "average", "min", "max" or "product"."""
    found = adapters.allreduce(to_numpy(tensor), op, name=name, process_set=process_set)
    return from_numpy(found, tensor.device)


def broadcast_parameters(parameters: list[Tensor], root_rank: int = 0) -> None:
    """Overwrite every rank's parameters with those of rank `root_rank`."""
    for each in parameters:
        each.assign(from_numpy(adapters.broadcast(to_numpy(each), root_rank), each.device)).realize()


def distribute(optimizer: Any, process_set: ProcessSet = global_process_set) -> Any:
    """Return `optimizer`, changed to use the average of all ranks' gradients in its steps."""
    plain_step = optimizer.step
    reducers: dict[Any, GradientReducer] = {}  # by membership, which changes after a failure

    def reducer_now() -> GradientReducer:
        members = adapters.members_of(process_set)
        if members not in reducers:
            forms = [(value.dtype.name, value.shape) for value in map(to_numpy, optimizer.params)]
            specs = [(f"parameter {number}", GradientSpec.row_major(*form)) for number, form in enumerate(forms)]
            reducers[members] = GradientReducer(
                specs,
                members.group,
                GradientOptions(op="average"),
                parameters=lambda: [to_numpy(each) for each in optimizer.params],
            )
        return reducers[members]

    def step() -> None:
        own = [None if each.grad is None else to_numpy(each.grad) for each in optimizer.params]
        for each, shared in zip(optimizer.params, reducer_now().reduce(own), strict=True):
            # tinygrad's optimizers need a gradient for each parameter; if no rank has one, use zero.
            gradient = np.zeros(each.shape, np.float32) if shared is None else shared.copy()
            each.grad = from_numpy(gradient, each.device)
        plain_step()

    optimizer.step = step
    return optimizer


class ModelState(ObjectState):
    """Parameters, and any other values as attributes, that a program resumes from after a failure."""

    def __init__(self, parameters: list[Tensor], **values: Any) -> None:
        self._parameters = parameters
        super().__init__(
            adapters.broadcast_object, adapters.rank, adapters.allgather_object, held=self._read(), **values
        )

    def _read(self) -> list[Any]:
        return [to_numpy(each) for each in self._parameters]

    def save(self) -> None:
        """Store the present state."""
        self.held = self._read()
        super().save()

    def restore(self) -> None:
        """Return to the stored state."""
        super().restore()
        for each, value in zip(self._parameters, self.held, strict=True):
            each.assign(from_numpy(value.copy(), each.device)).realize()

    def sync(self) -> None:
        """Overwrite the state of every rank with rank 0's, and store it."""
        self.save()
        super().sync()
        self.restore()
