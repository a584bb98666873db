"""The adapter of torch for the conformance suite."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

import multiring.torch as mt
from multiring._frontend.process_sets import ProcessSet, global_process_set
from multiring._runtime.arrays import numpy_dtype
from multiring.adapters.conformance import Adapter


def make(array: Any) -> torch.Tensor:
    if any(stride < 0 for stride in array.strides):
        array = array.copy()  # torch does not support negative strides
    if array.dtype == numpy_dtype("bfloat16"):
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array) if array.flags.writeable else torch.from_numpy(array.copy())


def back(tensor: torch.Tensor) -> Any:
    tensor = tensor.detach()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(numpy_dtype("bfloat16"))
    return tensor.numpy()


def all_reduce(
    tensor: torch.Tensor, op: str, *, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    return mt.allreduce(tensor, op=op, name=name, process_set=process_set)


def gradient(at: Any, weights: Any, op: str) -> Any:
    tensor = torch.tensor(at, requires_grad=True)
    (mt.allreduce(tensor, op=op) * torch.from_numpy(weights)).sum().backward()  # type: ignore[no-untyped-call]
    assert tensor.grad is not None
    return tensor.grad.numpy()


class Trainer:
    def __init__(self, parameters: Mapping[str, Any], rate: float, process_set: ProcessSet) -> None:
        self._model = torch.nn.Module()
        for name, value in parameters.items():
            self._model.register_parameter(name, torch.nn.Parameter(torch.from_numpy(value.copy())))
        named = list(self._model.named_parameters())
        plain = torch.optim.SGD([each for _, each in named], lr=rate)
        self._optimizer = mt.DistributedOptimizer(plain, named, process_set=process_set)

    def step(self, slopes: Mapping[str, Any]) -> None:
        self._optimizer.zero_grad()
        parts = [(self._model.get_parameter(name) * torch.from_numpy(slope)).sum() for name, slope in slopes.items()]
        torch.stack(parts).sum().backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()

    def parameters(self) -> dict[str, Any]:
        return {name: each.detach().numpy().copy() for name, each in self._model.named_parameters()}

    def state(self, **values: Any) -> Any:
        return mt.elastic.TorchState(model=self._model, optimizer=self._optimizer, **values)


ADAPTER = Adapter(
    name="torch",
    version=torch.__version__,
    make=make,
    back=back,
    all_reduce=all_reduce,
    trainer=Trainer,
    gradient=gradient,
    init=mt.init,
)
