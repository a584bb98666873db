"""The FLOP of operations that torch's counter leaves out or counts wrongly, two for a multiplication with its addition.

torch's counter knows the attention of GPUs and no recurrent layer, and takes the backward of a grouped convolution for
that of a full one: https://github.com/pytorch/pytorch/blob/main/torch/utils/flop_counter.py.
"""

import math
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import torch

Shape = Sequence[int]


def _attention(query: Shape, key: Shape, value: Shape, *_others: Any, **_options: Any) -> int:
    """Two products: of queries with keys, and of their weights with values."""
    *outer, queries, features = query
    return 2 * math.prod(outer) * queries * key[-2] * (features + value[-1])


def _attention_backward(
    _gradient: Shape, query: Shape, key: Shape, value: Shape, *_others: Any, **_options: Any
) -> int:
    """Two products for each of the forward's; what is computed once more to save memory does not count."""
    return 2 * _attention(query, key, value)


def _recurrent(given: Shape, into: Shape, across: Shape, *_others: Any, **_options: Any) -> int:
    """The gates of each step: of its input, and of the state before."""
    return 2 * given[0] * given[1] * (math.prod(into) + math.prod(across))


def _recurrent_backward(given: Shape, into: Shape, across: Shape, *_others: Any, **_options: Any) -> int:
    return 2 * _recurrent(given, into, across)


def _convolution_backward(gradient: Shape, given: Shape, weight: Shape, *others: Any, **_options: Any) -> int:
    """As many as forward for the gradient of the input, and as many for that of the weight, where they are wanted."""
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
    """Every combination of the three factors' indices, as torch.nn.Bilinear has."""
    spread = []
    for shape, added in zip((one, two, three), places, strict=False):
        full = list(shape)
        for place in sorted(added):
            full.insert(place, 1)
        spread.append(full)
    return 2 * math.prod(max(sizes) for sizes in zip_longest(*spread, fillvalue=1))


def _distances(one: Shape, other: Shape, **_options: Any) -> int:
    """Of many points to many, by one product."""
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
# Versions of torch differ in what there is.
FORMULAS: dict[Any, Any] = {
    getattr(torch.ops.aten, name): formula for name, formula in _BY_NAME.items() if hasattr(torch.ops.aten, name)
}
