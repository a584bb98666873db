"""In which type, and by which operation, a Group combines arrays of a type, as Horovod's results want it."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from multiring.errors import ArgumentError
from multiring.frontend.reduce_ops import LINEAR, Adasum, Average, Min, Product, name_of
from multiring.runtime.arrays import numpy_dtype

_REAL_OF = {"complex64": "float32", "complex128": "float64", "complex32": "float16"}  # the last one torch alone has
_FLOATS = frozenset({"float16", "bfloat16", "float32", "float64"})
_SIGNED = frozenset({"int8", "int16", "int32", "int64"})
_UNSIGNED = frozenset({"uint8", "uint16", "uint32", "uint64"})
_COMBINED = frozenset({*_FLOATS, *_SIGNED, *_UNSIGNED, "bool"})


@dataclass(frozen=True, slots=True)
class DtypeConversion:
    """How arrays of a type are combined.

    Complex numbers are summed as pairs of real ones. An average of signed integers is a sum of 64-bit integers, which
    is divided here, as a Group would round it towards minus infinity and Horovod truncates; one that is scaled
    afterwards is divided and scaled in one, as it would be truncated twice.
    """

    dtype: str  # in which a Group combines them, by NumPy's name
    op: str  # by which it does
    is_complex: bool  # there is one dimension more, of 2
    divisor: int = 1  # of results, truncating
    factor: float = 1.0  # by which results are multiplied
    is_plain: bool = False  # nothing of that: arrays are just what a Group takes, and gives


@lru_cache(maxsize=1024)
def dtype_conversion(dtype: str, op: int, postscale: float, ranks: int) -> DtypeConversion:
    """Return how arrays of `dtype`, by NumPy's name, are combined by `op` over so many ranks.

    Raises:
        ArgumentError: `op` has no meaning for `dtype`.
    """
    real = _REAL_OF.get(dtype, dtype)
    if real not in _COMBINED:
        known = ", ".join(sorted({*_COMBINED, *_REAL_OF}))
        raise ArgumentError(f"tensor of {dtype}: want one of {known}")
    if real != dtype and op not in LINEAR:
        raise ArgumentError(f"{name_of(op)} of {dtype}: want sum or average; complex numbers have no order")
    if dtype == "bool" and op == Average:
        raise ArgumentError("average of bool: want Sum or Max (any), Product or Min (all), or numbers")
    if op == Adasum and dtype not in _FLOATS:
        raise ArgumentError(f"adasum of {dtype}: want floating-point numbers, for they are scaled")
    if op == Average and real in _SIGNED | _UNSIGNED:
        if postscale != 1.0:
            return DtypeConversion("int64", "sum", is_complex=False, factor=postscale / ranks)
        if dtype in _SIGNED:
            return DtypeConversion("int64", "sum", is_complex=False, divisor=ranks)
    is_plain = real == dtype and postscale == 1.0
    return DtypeConversion(real, name_of(op), is_complex=real != dtype, factor=postscale, is_plain=is_plain)


def neutral_array(conversion: DtypeConversion, elements: int) -> "np.ndarray[Any, np.dtype[Any]]":
    """Return a flat array of so many elements that changes nothing when it is combined: zeros for sum and average."""
    dtype = numpy_dtype(conversion.dtype)
    if conversion.op in {"sum", "average"}:
        return np.zeros(elements, dtype)
    if conversion.op == name_of(Product):
        return np.ones(elements, dtype)
    is_min = conversion.op == name_of(Min)
    if conversion.dtype == "bool":
        return np.full(elements, is_min, dtype)
    if conversion.dtype in _FLOATS:
        return np.full(elements, np.inf if is_min else -np.inf, dtype)
    limits = np.iinfo(dtype)
    return np.full(elements, limits.max if is_min else limits.min, dtype)
