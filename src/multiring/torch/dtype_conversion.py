"""What of a reduction a Group sees: in which type and by which operation tensors of a type are combined."""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from multiring.errors import ArgumentError
from multiring.frontend.reduce_ops import LINEAR, Adasum, Average, Min, Product, name_of
from multiring.torch.interop import dtype_name

_REAL_OF = {torch.complex64: torch.float32, torch.complex128: torch.float64, torch.complex32: torch.float16}
_COMBINED = frozenset(
    {
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
        *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
        *(torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
    }
)


@dataclass(frozen=True, slots=True)
class WireForm:
    """How tensors of a type are combined.

    Complex numbers are summed as pairs of real ones. An average of signed integers is a sum of 64-bit integers, which
    is divided here, as a Group would round it towards minus infinity and Horovod truncates; one that is scaled
    afterwards is divided and scaled in one, as it would be truncated twice.
    """

    dtype: torch.dtype  # in which a Group combines them
    op: str  # by which it does
    is_complex: bool  # there is one dimension more, of 2
    divisor: int = 1  # of results, truncating
    factor: float = 1.0  # by which results are multiplied
    is_plain: bool = False  # nothing of that: tensors are just what a Group takes, and gives


@lru_cache(maxsize=1024)
def wire_form(dtype: torch.dtype, op: int, postscale: float, ranks: int) -> WireForm:
    """Return how tensors of `dtype` are combined by `op` over so many ranks.

    Raises:
        ArgumentError: `op` has no meaning for `dtype`.
    """
    real = _REAL_OF.get(dtype, dtype)
    if real not in _COMBINED:
        known = ", ".join(sorted(map(dtype_name, {*_COMBINED, *_REAL_OF})))
        raise ArgumentError(f"tensor of {dtype_name(dtype)}: want one of {known}")
    if real is not dtype and op not in LINEAR:
        raise ArgumentError(f"{name_of(op)} of {dtype_name(dtype)}: want sum or average; complex numbers have no order")
    if dtype is torch.bool and op == Average:
        raise ArgumentError("average of bool: want Sum or Max (any), Product or Min (all), or tensor.float()")
    if op == Adasum and not dtype.is_floating_point:
        raise ArgumentError(f"adasum of {dtype_name(dtype)}: want floating-point numbers, for they are scaled")
    is_integer = not (real.is_floating_point or dtype is torch.bool)
    if is_integer and op == Average:
        if postscale != 1.0:
            return WireForm(torch.int64, "sum", is_complex=False, factor=postscale / ranks)
        if dtype.is_signed:
            return WireForm(torch.int64, "sum", is_complex=False, divisor=ranks)
    is_plain = real is dtype and postscale == 1.0
    return WireForm(real, name_of(op), is_complex=real is not dtype, factor=postscale, is_plain=is_plain)


def wired(tensor: Tensor, form: WireForm, prescale: float) -> Tensor:
    """Return what a Group is to combine for `tensor`: `tensor` itself where nothing has to be done."""
    if form.is_plain and prescale == 1.0:
        return tensor
    found = scaled(tensor, prescale)
    if form.is_complex:
        return torch.view_as_real(found.resolve_conj())
    return found.to(form.dtype)


def unwired(combined: Tensor, form: WireForm, dtype: torch.dtype) -> Tensor:
    """Return the result of type `dtype` for what a Group combined: `combined` itself where nothing has to be done."""
    if form.is_plain:
        return combined
    found = torch.view_as_complex(combined) if form.is_complex else combined
    if form.divisor != 1:
        found = torch.div(found, form.divisor, rounding_mode="trunc")
    return scaled(found, form.factor).to(dtype)


def neutral(form: WireForm, elements: int) -> Tensor:
    """Return a flat tensor of so many elements that changes nothing when it is combined: zeros for sum and average."""
    if form.op in {"sum", "average"}:
        return torch.zeros(elements, dtype=form.dtype)
    if form.op == name_of(Product):
        return torch.ones(elements, dtype=form.dtype)
    is_min = form.op == name_of(Min)
    if form.dtype is torch.bool:
        return torch.full((elements,), is_min, dtype=torch.bool)
    if form.dtype.is_floating_point:
        return torch.full((elements,), float("inf" if is_min else "-inf"), dtype=form.dtype)
    limits = torch.iinfo(form.dtype)
    return torch.full((elements,), limits.max if is_min else limits.min, dtype=form.dtype)


def scaled(tensor: Tensor, factor: float) -> Tensor:
    """Return `tensor` times `factor`: integers by way of float64, and truncated; 16-bit floats by way of float32.

    Raises:
        ArgumentError: a tensor of bools.
    """
    if factor == 1.0:
        return tensor
    dtype = tensor.dtype
    if dtype.is_floating_point or dtype.is_complex:
        return (tensor.float() * factor).to(dtype) if dtype.itemsize == 2 else tensor * factor
    if dtype is torch.bool:
        raise ArgumentError(f"a factor of {factor} for a tensor of bool: want tensor.float(), or no factor")
    return (tensor.double() * factor).to(dtype)
