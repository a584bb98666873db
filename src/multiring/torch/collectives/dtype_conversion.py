"""Convert tensors to types that a Group combines, and convert the results back."""

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from multiring._frontend.dtype_conversion import DtypeConversion, dtype_conversion
from multiring._frontend.dtype_conversion import converted_back as array_converted_back
from multiring._frontend.integers import halves, scaled_integers
from multiring.errors import ArgumentError
from multiring.torch.interop import dtype_name, dtype_of


@lru_cache(maxsize=1024)
def conversion_of(dtype: torch.dtype, op: int, postscale: float, ranks: int) -> DtypeConversion:
    """Return the conversion for combining tensors of `dtype` by `op` over `ranks` ranks.

    See `dtype_conversion` for the errors.
    """
    return dtype_conversion(dtype_name(dtype), op, postscale, ranks)


def converted(tensor: Tensor, conversion: DtypeConversion, prescale: float) -> Tensor:
    """Return `tensor` in the form that a Group combines: `tensor` itself if no conversion is needed."""
    if conversion.is_plain and prescale == 1.0:
        return tensor
    found = scaled(tensor, prescale)
    if conversion.is_complex:
        return torch.view_as_real(found.resolve_conj())
    if conversion.is_split:
        return torch.from_numpy(halves(found.numpy()))
    return found.to(dtype_of(conversion.dtype))


def converted_back(combined: Tensor, conversion: DtypeConversion, dtype: torch.dtype) -> Tensor:
    """Convert a Group's result back to type `dtype`; return `combined` itself if no conversion is needed."""
    if conversion.is_plain:
        return combined
    if conversion.is_split or conversion.divisor != 1:
        whole = array_converted_back(combined.numpy(), conversion, np.dtype(dtype_name(dtype)))
        return torch.from_numpy(np.ascontiguousarray(whole).reshape(whole.shape))
    found = torch.view_as_complex(combined) if conversion.is_complex else combined
    return scaled(found, conversion.factor).to(dtype)


def scaled(tensor: Tensor, factor: float) -> Tensor:
    """Return `tensor` times `factor`: integers are truncated; 16-bit floats are multiplied in float32.

    Raises:
        ArgumentError: `tensor` is of type bool, and `factor` is not 1.
    """
    if factor == 1.0:
        return tensor
    dtype = tensor.dtype
    if dtype.is_floating_point or dtype.is_complex:
        return (tensor.float() * factor).to(dtype) if dtype.itemsize == 2 else tensor * factor
    if dtype is torch.bool:
        raise ArgumentError(f"a factor of {factor} for a tensor of bool: want tensor.float(), or no factor")
    return torch.from_numpy(scaled_integers(tensor.numpy(), factor))
