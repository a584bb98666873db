"""The adapter of Caffe for the conformance suite.

`caffe` is pycaffe or its stand-in; arrays are NumPy arrays.
"""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import caffe
import numpy as np

import multiring.caffe as mc
from multiring._frontend.process_sets import ProcessSet, global_process_set
from multiring.adapters.conformance import Adapter


def all_reduce(array: Any, op: str, *, name: str | None = None, process_set: ProcessSet = global_process_set) -> Any:
    return mc.allreduce(array, op, name=name, process_set=process_set)


def net_of(shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Return the text of a net whose loss is the sum of parameters times inputs."""
    layers = []
    for name, shape in shapes.items():
        dims = " ".join(f"dim: {size}" for size in shape)
        layers += [
            f'layer {{ name: "{name}" type: "Parameter" top: "{name}" parameter_param {{ shape {{ {dims} }} }} }}',
            f'layer {{ name: "{name}_in" type: "Input" top: "{name}_in" input_param {{ shape {{ {dims} }} }} }}',
            (
                f'layer {{ name: "{name}_x" type: "Eltwise" bottom: "{name}" bottom: "{name}_in" top: "{name}_x" '
                "eltwise_param { operation: PROD } }"
            ),
            (
                f'layer {{ name: "{name}_sum" type: "Reduction" bottom: "{name}_x" top: "{name}_sum" '
                "reduction_param { operation: SUM } loss_weight: 1 }"
            ),
        ]
    return "\n".join(layers)


class Trainer:
    def __init__(self, parameters: Mapping[str, Any], rate: float, process_set: ProcessSet) -> None:
        with tempfile.TemporaryDirectory() as folder:
            net, solver = Path(folder) / "net.prototxt", Path(folder) / "solver.prototxt"
            # Caffe's Reduction layer needs at least one dimension.
            self._shapes = {name: value.shape for name, value in parameters.items()}
            net.write_text(net_of({name: shape or (1,) for name, shape in self._shapes.items()}))
            solver.write_text(f'net: "{net}"\nbase_lr: {rate}\nlr_policy: "fixed"\nmax_iter: 100\n')
            mc.set_solver_rank(process_set)
            self._solver = caffe.SGDSolver(str(solver))
        mc.distribute(self._solver, process_set=process_set)
        for name, value in parameters.items():  # checks may give each rank its own values
            self._solver.net.params[name][0].data[...] = value

    def step(self, slopes: Mapping[str, Any]) -> None:
        net = self._solver.net
        for name in net.params:
            net.blobs[f"{name}_in"].data[...] = slopes.get(name, 0)
        self._solver.step(1)

    def parameters(self) -> dict[str, Any]:
        return {
            name: np.array(blobs[0].data).reshape(self._shapes[name]) for name, blobs in self._solver.net.params.items()
        }

    def state(self, **values: Any) -> Any:
        return mc.elastic.CaffeState(self._solver, **values)


ADAPTER = Adapter(
    name="Caffe's stand-in" if getattr(caffe, "standin", False) else "Caffe",
    version=caffe.__version__,
    make=lambda array: array,
    back=lambda array: array,
    all_reduce=all_reduce,
    trainer=Trainer,
    init=mc.init,
    cannot={"gradients through": "Caffe differentiates only layers, and it has no layer that calls a collective"},
)
