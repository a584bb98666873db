"""A data set of arrays in memory."""

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from multiring._arguments import require_flag, require_seed, shown
from multiring.data.orders import ExactOrder, Order, SequentialOrder
from multiring.errors import ArgumentError


class ArrayDataset:
    """A data set of arrays in memory, for `Loader` and for `multiring.training`.

    Args:
        arrays: the fields by name; each array has the samples on its first axis.
        seed: the seed of the order.
        shuffle: whether each epoch has another order; False keeps the order of the arrays, for evaluation.

    Raises:
        ArgumentError: there is no array or no sample, the numbers of samples differ, an array holds Python objects,
            `seed` is not a whole number, or `shuffle` not a truth value.
    """

    def __init__(self, arrays: Mapping[str, Any], *, seed: int = 0, shuffle: bool = True) -> None:
        if not isinstance(arrays, Mapping):
            raise ArgumentError(f"arrays={shown(arrays)}: want a dict of arrays, such as {{'image': images}}")
        seed, shuffle = require_seed("seed", seed), require_flag("shuffle", shuffle)
        self._arrays = {name: np.asarray(value) for name, value in arrays.items()}
        shapes = {name: value.shape for name, value in self._arrays.items()}
        lengths = {shape[0] if shape else 0 for shape in shapes.values()}
        if len(lengths) != 1 or 0 in lengths:
            raise ArgumentError(f"arrays of the shapes {shapes}: want one first dimension of 1 or more samples")
        digest = hashlib.blake2b(digest_size=8)
        for name, value in self._arrays.items():
            if value.dtype.hasobject:
                raise ArgumentError(f"array {name!r} holds Python objects: want numbers, bool or text")
            digest.update(f"{name} {value.dtype.str} {value.shape}".encode() + np.ascontiguousarray(value).tobytes())
        self.seed, self.digest = seed, digest.hexdigest()
        [length] = lengths
        self.order: Order = ExactOrder(length, seed) if shuffle else SequentialOrder(length)

    def __len__(self) -> int:
        """Return the number of samples."""
        return self.order.length

    def sample(self, number: int, epoch: int = 0, draw: int = 0) -> dict[str, Any]:  # noqa: ARG002 -- of augmented data
        """Return a sample's fields; the same in every epoch."""
        return {name: value[number] for name, value in self._arrays.items()}
