"""FLOP formulas of operations that torch's counter leaves out or counts wrongly.

A multiplication with its addition counts as two FLOP. torch's counter knows only the attention of GPUs and no recurrent
layers, and it counts the backward of a grouped convolution like that of a full one:
https://github.com/pytorch/pytorch/blob/main/torch/utils/flop_counter.py.
"""

import math
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import torch

Shape = Sequence[int]


def _attention(query: Shape, key: Shape, value: Shape, *_others: Any, **_options: Any) -> int:
    """Count the products of queries with keys, and of attention weights with values."""
    *outer, queries, features = query
    return 2 * math.prod(outer) * queries * key[-2] * (features + value[-1])


def _attention_backward(
    _gradient: Shape, query: Shape, key: Shape, value: Shape, *_others: Any, **_options: Any
) -> int:
    """Count two products for each forward product; recomputation to save memory does not count."""
    return 2 * _attention(query, key, value)


def _recurrent(given: Shape, into: Shape, across: Shape, *_others: Any, **_options: Any) -> int:
    """Count the gates of all time steps: the products with the inputs and with the previous states."""
    return 2 * given[0] * given[1] * (math.prod(into) + math.prod(across))


def _recurrent_backward(given: Shape, into: Shape, across: Shape, *_others: Any, **_options: Any) -> int:
    return 2 * _recurrent(given, into, across)


def _convolution_backward(gradient: Shape, given: Shape, weight: Shape, *others: Any, **_options: Any) -> int:
    """Count each wanted gradient (of the input, of the weight) like the forward."""
    is_transposed, wanted = others[4], others[7]
    positions = given if is_transposed else gradient
    return 2 * positions[0] * math.prod(positions[2:]) * math.prod(weight) * (int(wanted[0]) + int(wanted[1]))


def _matrix_vector(matrix: Shape, *_others: Any, **_options: Any) -> int:
    return 2 * math.prod(matrix)


def _added_matrix_vector(_added: Shape, matrix: Shape, *_others: Any, **_options: Any) -> int:
    return 2 * math.prod(matrix)


def _sum_of_products(_added: Shape, one: Shape, other: Shape, **_options: Any) -> int:
    return 2 * math.prod(one) * other[-1]


def _three_factors(one: Shape, two: Shape, three: Shape, *places: Any, **_options: Any) -> int:
    """Count one product for each combination of the three factors' indices, as in torch.nn.Bilinear."""
    spread = []
    for shape, added in zip((one, two, three), places, strict=False):
        full = list(shape)
        for place in sorted(added):
            full.insert(place, 1)
        spread.append(full)
    return 2 * math.prod(max(sizes) for sizes in zip_longest(*spread, fillvalue=1))


def _distances(one: Shape, other: Shape, **_options: Any) -> int:
    """Count the distances between two sets of points as one matrix product."""
    return 2 * math.prod(one) * other[-2]


_BY_NAME = {
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "mkldnn_rnn_layer": _recurrent,
    "mkldnn_rnn_layer_backward": _recurrent_backward,
    "convolution_backward": _convolution_backward,
    "mv": _matrix_vector,
    "dot": _matrix_vector,
    "vdot": _matrix_vector,
    "addmv": _added_matrix_vector,
    "addbmm": _sum_of_products,
    "_trilinear": _three_factors,
    "_euclidean_dist": _distances,
}
# Each version of torch has only some of these operations.
FORMULAS: dict[Any, Any] = {
    getattr(torch.ops.aten, name): formula for name, formula in _BY_NAME.items() if hasattr(torch.ops.aten, name)
}
