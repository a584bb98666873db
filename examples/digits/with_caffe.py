"""Digits with Caffe: `multiring run -n 2 -- python examples/digits/with_caffe.py`. It needs pycaffe."""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import caffe
import numpy as np
from digits_task import BATCH, MOMENTUM, RATE, main  # type: ignore[import-not-found] # beside this file

import multiring.caffe as mc

NET = """
layer {{ name: "images" type: "Input" top: "images" input_param {{ shape {{ dim: {rows} dim: 64 }} }} }}
layer {{ name: "labels" type: "Input" top: "labels" input_param {{ shape {{ dim: {rows} }} }} }}
layer {{ name: "first" type: "InnerProduct" bottom: "images" top: "first" inner_product_param {{ num_output: 128 }} }}
layer {{ name: "relu" type: "ReLU" bottom: "first" top: "hidden" }}
layer {{ name: "last" type: "InnerProduct" bottom: "hidden" top: "last" inner_product_param {{ num_output: 10 }} }}
layer {{ name: "loss" type: "SoftmaxWithLoss" bottom: "last" bottom: "labels" top: "loss" }}
"""
SOLVER = 'net: "{net}"\nbase_lr: {rate}\nmomentum: {momentum}\nlr_policy: "fixed"\nmax_iter: 100000\n'


class Model:
    """The network, trained by a solver with the gradients of all ranks."""

    def __init__(self, weights: Mapping[str, Any]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            net, solver = Path(folder) / "net.prototxt", Path(folder) / "solver.prototxt"
            net.write_text(NET.format(rows=BATCH // mc.size()), encoding="utf-8")
            solver.write_text(SOLVER.format(net=net, rate=RATE, momentum=MOMENTUM), encoding="utf-8")
            self._solver = caffe.SGDSolver(str(solver))
        params = self._solver.net.params
        params["first"][0].data[...], params["first"][1].data[...] = weights["a"].T, weights["b"]
        params["last"][0].data[...], params["last"][1].data[...] = weights["c"].T, weights["d"]
        mc.distribute(self._solver)

    def step(self, images: Any, labels: Any) -> float:
        """See digits_task.Model."""
        blobs = self._solver.net.blobs
        blobs["images"].data[...], blobs["labels"].data[...] = images, labels
        self._solver.step(1)
        return float(blobs["loss"].data)

    def scores(self, images: Any) -> Any:
        """See digits_task.Model."""
        net = self._solver.net
        rows = net.blobs["images"].data.shape[0]
        found = []
        for first in range(0, len(images), rows):
            part = images[first : first + rows]
            net.blobs["images"].data[: len(part)] = part
            net.forward()
            found.append(net.blobs["last"].data[: len(part)].copy())
        return np.concatenate(found)


if __name__ == "__main__":
    main("Caffe", mc.init, Model)
