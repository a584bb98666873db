"""Check that all ranks have the same model and the same data."""

import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import numpy as np
from numpy.typing import NDArray

from multiring._frontend import array_collectives
from multiring._frontend.object_collectives import allgather_object
from multiring._frontend.reduce_ops import Average
from multiring.errors import ArgumentError
from multiring.keras.values import broadcast_variables, settled

_MOST_BYTES = 16 << 20  # for a larger array, about this many bytes are compared: rows at even distances

# TensorFlow's composite tensors. The attributes hold all of a tensor's content.
_PARTS = {"RaggedTensor": ("flat_values", "nested_row_splits"), "SparseTensor": ("indices", "values")}


def digests(variables: Iterable[Any]) -> list[Any]:
    """Return the digests of each rank's variables, by rank. Every rank calls it."""
    return allgather_object([_digest(np.asarray(_plain(each.value))) for each in variables], name="keras.replicas")


def same_variables(model: Any) -> None:
    """Broadcast rank 0's variables of a built model if the ranks' variables differ.

    Every rank calls it.
    """
    if not model.built:
        return
    settled(model)
    everybodys = digests(model.variables)
    if any(each != everybodys[0] for each in everybodys):
        broadcast_variables(model.variables)


def mean_states(model: Any) -> list[str]:
    """Average non-trainable weights that differ between ranks, and return their paths.

    Every rank calls it. Weights that are not floating point are set to rank 0's values instead.
    """
    variables = list(model.non_trainable_weights)
    if not variables:
        return []
    settled(model)
    everybodys = digests(variables)
    names = []
    for place, variable in enumerate(variables):
        if all(each[place] == everybodys[0][place] for each in everybodys):
            continue
        value = np.asarray(_plain(variable.value))
        names.append(variable.path)
        if value.dtype.kind != "f":
            broadcast_variables([variable])
            continue
        whole = array_collectives.allreduce(value.astype(np.float64), Average, name=f"keras.states.{place}")
        variable.assign(whole.astype(value.dtype))
    return names


def same_data(data: Sequence[Any]) -> None:
    """Check that all ranks have the same arrays. Every rank calls it.

    Raises:
        ArgumentError: on every rank: the ranks' arrays differ.
    """
    leaves = [leaf for each in data if each is not None for leaf in keras.tree.flatten(each) if leaf is not None]
    everybodys = allgather_object([_sample(leaf) for leaf in leaves], name="keras.data")
    other = [number for number, each in enumerate(everybodys) if each != everybodys[0]]
    if other:
        raise ArgumentError(
            f"the data of rank {other[0]} differ from rank 0's: distribute needs all of the data on every rank, and "
            "divides them itself. If they are random, use the same seed on all ranks (keras.utils.set_random_seed); if "
            "each rank has its own data, use DistributedOptimizer without distribute"
        )


def _sample(leaf: Any) -> tuple[str, tuple[int, ...], int]:
    names = _PARTS.get(type(leaf).__name__)
    if names is not None:  # a dense array would not distinguish zeros from missing elements
        parts = [_sample(each)[2] for name in names for each in keras.tree.flatten(getattr(leaf, name))]
        return type(leaf).__name__, (int(leaf.shape[0]),), hash(tuple(parts))
    plain: Any = _plain(leaf)
    if hasattr(plain, "tocsr"):  # a sparse array of scipy
        sparse = plain.tocsr()
        parts = [_digest(each) for each in (sparse.data, sparse.indices, sparse.indptr)]
        return "sparse", tuple(sparse.shape), hash(tuple(parts))
    array = np.asarray(plain)
    rows = len(array) if array.ndim else 1
    every = max(1, -(-array.nbytes // _MOST_BYTES))
    taken = array[:: min(every, rows)] if array.ndim and rows else array
    return str(array.dtype), tuple(array.shape), _digest(taken)


def _digest(array: NDArray[Any]) -> int:
    if array.dtype.kind == "O":
        return zlib.crc32(repr(array.tolist()).encode())
    return zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def _plain(value: Any) -> Any:
    return keras.ops.convert_to_numpy(value) if keras.ops.is_tensor(value) else value
