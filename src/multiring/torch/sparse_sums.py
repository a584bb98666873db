"""Sums and averages of the entries of several sparse tensors."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from multiring._frontend.integers import average_of_halves, halves
from multiring.torch.interop import dtype_name


def sum_of_entries(places: Tensor, values: Tensor, shape: Sequence[int]) -> Tensor:
    """Return the coalesced sparse tensor of the entries, adding up entries of the same index.

    Each row of `places` is the index of one entry.
    """
    # Skip the check of the invariants: it would take longer than the sum, and a coalesced tensor satisfies them.
    return torch.sparse_coo_tensor(
        places.t(), values, tuple(shape), device=values.device, check_invariants=False
    ).coalesce()


def average_of_entries(
    places: Tensor, values: Tensor, shape: Sequence[int], ranks: int, factor: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return the distinct indices, and for each the sum of its entries divided by `ranks`.

    Integers are summed exactly, because a sum may need more bits than its average. The sums are then divided,
    multiplied by `factor` and truncated. Other types are divided, but not multiplied by `factor`.
    """
    dtype = values.dtype
    if dtype.is_floating_point or dtype.is_complex:
        total = sum_of_entries(places, values, shape)
        return total.indices(), total.values() / ranks
    split = torch.from_numpy(halves(values.numpy()))
    total = sum_of_entries(places, split, (*shape, 2))
    whole = average_of_halves(total.values().numpy(), ranks, factor, np.dtype(dtype_name(dtype)))
    return total.indices(), torch.from_numpy(whole)
