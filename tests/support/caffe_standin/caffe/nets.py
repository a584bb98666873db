"""Nets, which consist of blobs and layers."""

from collections import OrderedDict
from typing import Any

import numpy as np

from caffe.layers import KINDS
from caffe.prototxt import one, read

TRAIN, TEST = 0, 1


class Blob:
    """An array and its gradient. Blobs of a shared parameter use the same memory.

    As in pycaffe, each access to `data` or `diff` returns a new view.
    """

    def __init__(self, shape: Any) -> None:
        self.standin_data = np.zeros(shape, np.float32)
        self.standin_diff = np.zeros(shape, np.float32)

    @property
    def data(self) -> Any:
        return self.standin_data.view()

    @property
    def diff(self) -> Any:
        return self.standin_diff.view()

    @property
    def shape(self) -> Any:
        return self.standin_data.shape

    @property
    def count(self) -> int:
        return self.standin_data.size

    def reshape(self, *shape: int) -> None:
        if self.shape != shape:
            self.standin_data, self.standin_diff = np.zeros(shape, np.float32), np.zeros(shape, np.float32)


class Net:
    """The blobs and layers of a net file in one phase, TRAIN or TEST."""

    def __init__(self, path: str, phase: int) -> None:
        self.blobs: OrderedDict[str, Blob] = OrderedDict()
        self.params: OrderedDict[str, tuple[Blob, ...]] = OrderedDict()
        self.layers: list[Any] = []
        self._layer_names: list[str] = []
        self.bottom_names: dict[str, list[str]] = {}
        self.top_names: dict[str, list[str]] = {}
        self.rates: list[tuple[Blob, float, float]] = []  # trainable blobs; factors of learning rate and decay
        self._owners: dict[str, Blob] = {}
        for message in read(path).get("layer", []):
            if self._is_in(message, phase):
                self._layer_names.append(one(message, "name"))
                self.bottom_names[self._layer_names[-1]] = list(message.get("bottom", []))
                self.top_names[self._layer_names[-1]] = list(message.get("top", []))
                self._add(message, phase)

    @staticmethod
    def _is_in(message: Any, phase: int) -> bool:
        wanted = one(one(message, "include", {}), "phase")
        return wanted is None or wanted == ("TRAIN", "TEST")[phase]

    def _add(self, message: Any, phase: int) -> None:
        bottoms = [self.blobs[name] for name in message.get("bottom", [])]
        tops = [self.blobs.setdefault(name, Blob(())) for name in message.get("top", [])]
        layer = KINDS[one(message, "type")](message, bottoms, tops, phase)
        shapes = layer.set_up()
        held = []
        for number, shape in enumerate(shapes):
            specs = message.get("param", [])
            spec = specs[number] if number < len(specs) else {}
            shared = one(spec, "name")
            blob = Blob(shape)
            if shared in self._owners:  # the blob uses the owner's memory
                owner = self._owners[shared]
                blob.standin_data, blob.standin_diff = owner.standin_data, owner.standin_diff
            else:
                layer.fill(number, blob)
                self.rates.append((blob, one(spec, "lr_mult", 1), one(spec, "decay_mult", 1)))
                if shared:
                    self._owners[shared] = blob
            held.append(blob)
        layer.held = held
        if held:
            self.params[one(message, "name")] = tuple(held)
        layer.reshape()
        self.layers.append(layer)

    def forward(self) -> dict[str, Any]:
        """Run the forward pass; return all scalar blobs by name."""
        for layer in self.layers:
            layer.reshape()
            layer.forward()
        return {name: blob.data for name, blob in self.blobs.items() if blob.data.ndim == 0}

    def loss(self) -> float:
        return float(sum(layer.loss_weight * layer.tops[0].data for layer in self.layers if layer.loss_weight))

    def backward(self) -> None:
        """Run the backward pass, which adds to the parameters' gradients."""
        for blob in self.blobs.values():
            blob.diff[...] = 0
        for layer in reversed(self.layers):
            if layer.loss_weight:
                layer.tops[0].diff[...] = layer.loss_weight
            layer.backward()

    def clear_param_diffs(self) -> None:
        for blob, _, _ in self.rates:
            blob.diff[...] = 0

    def copy_from(self, path: str) -> None:
        """Load the parameters from a file. Layers are matched by name."""
        with np.load(path) as kept:
            for name, blobs in self.params.items():
                for number, blob in enumerate(blobs):
                    if f"{name}.{number}" in kept:
                        blob.data[...] = kept[f"{name}.{number}"]

    def save(self, path: str) -> None:
        held: dict[str, Any] = {
            f"{name}.{number}": blob.data for name, blobs in self.params.items() for number, blob in enumerate(blobs)
        }
        with open(path, "wb") as file:  # noqa: PTH123 -- given a path, NumPy would append .npz
            np.savez(file, **held)
