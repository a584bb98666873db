"""The adapter of tinygrad for the conformance suite.

It uses examples/tinygrad_multiring.py.
"""

import importlib.metadata
from collections.abc import Mapping
from typing import Any

import numpy as np
import tinygrad_multiring as tm  # type: ignore[import-not-found] # in examples/
from tinygrad import Context, Tensor, nn

from multiring._frontend.process_sets import ProcessSet
from multiring._runtime.arrays import numpy_dtype
from multiring.adapters.conformance import Adapter

_OUTSIDE = "tinygrad differentiates only its own operations, and a collective is not one of them"


def make(array: Any) -> Tensor:
    # Compilers before clang 17 do not support bfloat16; tinygrad's interpreter does.
    return tm.from_numpy(array, "PYTHON" if array.dtype == numpy_dtype("bfloat16") else None)


class Trainer:
    def __init__(self, parameters: Mapping[str, Any], rate: float, process_set: ProcessSet) -> None:
        # tinygrad's optimizers reject parameters without dimensions.
        self._shapes = {name: value.shape for name, value in parameters.items()}
        self._parameters = {name: Tensor(np.array(value, ndmin=1)).realize() for name, value in parameters.items()}
        plain = nn.optim.SGD(list(self._parameters.values()), lr=rate)
        self._optimizer = tm.distribute(plain, process_set)

    def step(self, slopes: Mapping[str, Any]) -> None:
        with Context(TRAINING=1):
            self._optimizer.zero_grad()
            parts = [(self._parameters[name] * Tensor(slope)).sum() for name, slope in slopes.items()]
            sum(parts[1:], parts[0]).backward()
            self._optimizer.step()

    def parameters(self) -> dict[str, Any]:
        return {name: each.numpy().reshape(self._shapes[name]) for name, each in self._parameters.items()}

    def state(self, **values: Any) -> Any:
        return tm.ModelState(list(self._parameters.values()), **values)


ADAPTER = Adapter(
    name="tinygrad",
    version=importlib.metadata.version("tinygrad"),
    make=make,
    back=tm.to_numpy,
    all_reduce=tm.all_reduce,
    trainer=Trainer,
    cannot={
        "gradients through": _OUTSIDE,
        "type complex64": "tinygrad has no complex numbers",
        "type complex128": "tinygrad has no complex numbers",
    },
)
