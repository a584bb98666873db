"""The layers that the stand-in implements."""

from typing import Any

import numpy as np

from caffe.prototxt import one
from caffe.settings import Place


class Layer:
    """A layer. `held` lists its parameters; `backward` adds to their gradients."""

    loss_weight = 0.0

    def __init__(self, message: Any, bottoms: list[Any], tops: list[Any], phase: int) -> None:
        self.message, self.bottoms, self.tops, self.phase = message, bottoms, tops, phase
        self.held: list[Any] = []
        self.loss_weight = one(message, "loss_weight", type(self).loss_weight)

    def set_up(self) -> list[Any]:
        """Return the shapes of the parameters."""
        return []

    def fill(self, number: int, blob: Any) -> None:
        """Set the initial values of a parameter."""

    def reshape(self) -> None:
        """Set the shapes of the tops (outputs)."""

    def forward(self) -> None:
        """Compute the tops (outputs) from the bottoms (inputs)."""

    def backward(self) -> None:
        """Add to the gradients of the bottoms (inputs) and the parameters."""


def _dims(message: Any) -> tuple[int, ...]:
    return tuple(one(message, "shape", {}).get("dim", []))


class Input(Layer):
    def reshape(self) -> None:
        if self.tops[0].count <= 1 and self.tops[0].shape == ():
            self.tops[0].reshape(*_dims(one(self.message, "input_param", {})))


class Parameter(Layer):
    def set_up(self) -> list[Any]:
        return [_dims(one(self.message, "parameter_param", {}))]

    def reshape(self) -> None:
        top, held = self.tops[0], self.held[0]
        top.standin_data, top.standin_diff = held.standin_data, np.zeros_like(held.diff)

    def backward(self) -> None:
        self.held[0].diff[...] += self.tops[0].diff


class Eltwise(Layer):
    def reshape(self) -> None:
        self.tops[0].reshape(*self.bottoms[0].shape)

    def forward(self) -> None:
        if one(one(self.message, "eltwise_param", {}), "operation") == "PROD":
            self.tops[0].data[...] = np.prod([each.data for each in self.bottoms], axis=0)
        else:
            self.tops[0].data[...] = np.sum([each.data for each in self.bottoms], axis=0)

    def backward(self) -> None:
        is_product = one(one(self.message, "eltwise_param", {}), "operation") == "PROD"
        for place, bottom in enumerate(self.bottoms):
            others = [each.data for number, each in enumerate(self.bottoms) if number != place]
            bottom.diff[...] += self.tops[0].diff * (np.prod(others, axis=0) if is_product else 1)


class Reduction(Layer):
    def reshape(self) -> None:
        super().reshape()
        assert self.bottoms[0].shape, "Check failed: axis_index < num_axes()"  # Reduction's default axis is 0

    def forward(self) -> None:
        self.tops[0].data[...] = self.bottoms[0].data.sum()

    def backward(self) -> None:
        self.bottoms[0].diff[...] += self.tops[0].diff


class InnerProduct(Layer):
    def set_up(self) -> list[Any]:
        outputs = one(one(self.message, "inner_product_param"), "num_output")
        self._inputs = int(np.prod(self.bottoms[0].shape[1:]))
        return [(outputs, self._inputs), (outputs,)]

    def fill(self, number: int, blob: Any) -> None:
        if number == 0:
            filler = one(one(self.message, "inner_product_param"), "weight_filler", {})
            limit = {"xavier": np.sqrt(3 / self._inputs)}.get(one(filler, "type"), 0)
            # Programs seed NumPy's global generator to choose the weights.
            blob.data[...] = np.random.uniform(-limit, limit, blob.shape)  # noqa: NPY002

    def reshape(self) -> None:
        self.tops[0].reshape(self.bottoms[0].shape[0], self.held[1].count)

    def forward(self) -> None:
        flat = self.bottoms[0].data.reshape(len(self.bottoms[0].data), -1)
        self.tops[0].data[...] = flat @ self.held[0].data.T + self.held[1].data

    def backward(self) -> None:
        bottom, top = self.bottoms[0], self.tops[0]
        self.held[0].diff[...] += top.diff.T @ bottom.data.reshape(len(bottom.data), -1)
        self.held[1].diff[...] += top.diff.sum(0)
        bottom.diff[...] += (top.diff @ self.held[0].data).reshape(bottom.shape)


class ReLU(Layer):
    def reshape(self) -> None:
        self.tops[0].reshape(*self.bottoms[0].shape)

    def forward(self) -> None:
        np.maximum(self.bottoms[0].data, 0, out=self.tops[0].data)

    def backward(self) -> None:
        self.bottoms[0].diff[...] += self.tops[0].diff * (self.bottoms[0].data > 0)


class SoftmaxWithLoss(Layer):
    loss_weight = 1.0

    def forward(self) -> None:
        scores, labels = self.bottoms[0].data, self.bottoms[1].data.astype(np.int64).reshape(-1)
        powers = np.exp(scores - scores.max(1, keepdims=True))
        self._found = powers / powers.sum(1, keepdims=True)
        self.tops[0].data[...] = -np.log(self._found[np.arange(len(labels)), labels]).mean()

    def backward(self) -> None:
        labels = self.bottoms[1].data.astype(np.int64).reshape(-1)
        slope = self._found.copy()
        slope[np.arange(len(labels)), labels] -= 1
        self.bottoms[0].diff[...] += self.tops[0].diff * slope / len(labels)


class Accuracy(Layer):
    def forward(self) -> None:
        labels = self.bottoms[1].data.reshape(-1)
        self.tops[0].data[...] = (self.bottoms[0].data.argmax(1) == labels).mean()


class Data(Layer):
    """A layer that reads records from a NumPy file with `data` and `label`.

    Each solver reads its own part of the records. As in Caffe, the reader starts when the layer is made. The layer
    therefore uses the solver count and rank that its thread has at that time.
    """

    param = "data_param"

    def set_up(self) -> list[Any]:
        param = one(self.message, self.param)
        self._count, self._rank = Place.count, Place.rank
        with np.load(one(param, "source")) as kept:
            self._records, self._labels = kept["data"], kept["label"]
        self._batch, self._offset = one(param, "batch_size"), 0
        return []

    def reshape(self) -> None:
        self.tops[0].reshape(self._batch, *self._records.shape[1:])
        self.tops[1].reshape(self._batch)

    def forward(self) -> None:
        for place in range(self._batch):
            while self.phase == 0 and self._offset % self._count != self._rank:
                self._offset += 1
            record = self._offset % len(self._labels)
            self.tops[0].data[place], self.tops[1].data[place] = self._records[record], self._labels[record]
            self._offset += 1


class HDF5Data(Data):
    """A layer for HDF5 files. Caffe skips the other solvers' rows of these, too."""

    param = "hdf5_data_param"


KINDS = {
    each.__name__: each
    for each in (Input, Parameter, Eltwise, Reduction, InnerProduct, ReLU, SoftmaxWithLoss, Accuracy, Data, HDF5Data)
}
