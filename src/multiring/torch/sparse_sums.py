"""What the entries of several sparse tensors add up to, or are on average."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from multiring.frontend.integers import average_of_halves, halves
from multiring.torch.interop import dtype_name


def sum_of_entries(places: Tensor, values: Tensor, shape: Sequence[int]) -> Tensor:
    """Return the coalesced sparse tensor of entries, of which several may have one place; `places` has them as rows."""
    # Checking would take longer than the sum, and what torch has coalesced is right.
    return torch.sparse_coo_tensor(places.t(), values, tuple(shape), check_invariants=False).coalesce()


def average_of_entries(
    places: Tensor, values: Tensor, shape: Sequence[int], ranks: int, factor: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return where the entries are, and the average of each place's over `ranks`.

    Integers are summed exactly, as a sum may need more bits than the average, then divided, multiplied by `factor` and
    truncated; others are divided, and not multiplied.
    """
    dtype = values.dtype
    if dtype.is_floating_point or dtype.is_complex:
        total = sum_of_entries(places, values, shape)
        return total.indices(), total.values() / ranks
    split = torch.from_numpy(halves(values.numpy()))
    total = sum_of_entries(places, split, (*shape, 2))
    whole = average_of_halves(total.values().numpy(), ranks, factor, np.dtype(dtype_name(dtype)))
    return total.indices(), torch.from_numpy(whole)
