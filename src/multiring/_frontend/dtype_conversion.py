"""Choose the type and the operation with which a Group combines arrays, so that results agree with Horovod's."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from multiring._frontend.integers import average_of_halves, halves, scaled_integers
from multiring._frontend.reduce_ops import LINEAR, Adasum, Average, Min, Product, name_of
from multiring._runtime.arrays import numpy_dtype
from multiring.errors import ArgumentError

_REAL_OF = {"complex64": "float32", "complex128": "float64", "complex32": "float16"}  # only torch has complex32
_FLOATS = frozenset({"float16", "bfloat16", "float32", "float64"})
_SIGNED = frozenset({"int8", "int16", "int32", "int64"})
_UNSIGNED = frozenset({"uint8", "uint16", "uint32", "uint64"})
_COMBINED = frozenset({*_FLOATS, *_SIGNED, *_UNSIGNED, "bool"})


@dataclass(frozen=True, slots=True)
class DtypeConversion:
    """How arrays of a type are combined.

    Complex numbers are summed as pairs of real numbers. To average signed integers, the Group sums 64-bit integers, and
    this module divides the sum. If the average is also scaled, this module divides and scales in one step, because two
    steps would truncate twice. The upper and lower halves of 64-bit integers are summed separately: their sum may need
    more than 64 bits, although the average does not.
    """

    dtype: str  # the type that the Group combines, by NumPy's name
    op: str  # the Group's operation
    is_complex: bool  # the Group's arrays have one more dimension, of 2
    is_split: bool = False  # the Group's arrays have one more dimension, of 2: the halves of integers
    divisor: int = 1  # results are divided by this number, and truncated
    factor: float = 1.0  # results are multiplied by this number
    is_plain: bool = False  # no conversion: the Group takes and returns the caller's arrays as they are

    @property
    def more(self) -> tuple[int, ...]:
        """The dimensions of a Group's arrays that follow the caller's dimensions."""
        return (2,) if self.is_complex or self.is_split else ()


@lru_cache(maxsize=1024)
def dtype_conversion(dtype: str, op: int, postscale: float, ranks: int) -> DtypeConversion:
    """Return how a Group combines arrays of `dtype` by `op`.

    Args:
        dtype: NumPy's name of the type.
        op: one of the numbers in `reduce_ops`.
        postscale: the factor that multiplies the result.
        ranks: the number of ranks.

    Raises:
        ArgumentError: `dtype` is not supported, or `op` is not defined for it.
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
        raise ArgumentError(f"adasum of {dtype}: want floating-point numbers, because Adasum scales them")
    if op == Average and (real in _SIGNED or (real in _UNSIGNED and (postscale != 1.0 or real == "uint64"))):
        is_split = real in {"int64", "uint64"}
        return DtypeConversion("int64", "sum", is_complex=False, is_split=is_split, divisor=ranks, factor=postscale)
    is_plain = real == dtype and postscale == 1.0
    return DtypeConversion(real, name_of(op), is_complex=real != dtype, factor=postscale, is_plain=is_plain)


def converted(array: NDArray[Any], conversion: DtypeConversion, prescale: float = 1.0) -> NDArray[Any]:
    """Return `array`, scaled by `prescale`, in the form that a Group combines.

    The result may share the memory of `array`.
    """
    found = scaled(array, prescale)
    if conversion.is_split:
        return halves(found)
    kind = numpy_dtype(conversion.dtype)
    if conversion.is_complex:
        return np.ascontiguousarray(found).reshape(-1).view(kind).reshape(*array.shape, 2)
    return found.astype(kind, copy=False)


def converted_back(combined: NDArray[Any], conversion: DtypeConversion, dtype: "np.dtype[Any]") -> NDArray[Any]:
    """Return the caller's result for a Group's result.

    It may share the memory of `combined`.

    Args:
        combined: the Group's result: the caller's dimensions, followed by those of `conversion.more`.
        conversion: the conversion that made the Group's arrays.
        dtype: the type of the caller's arrays, and of the result.
    """
    if conversion.is_split:
        return average_of_halves(combined, conversion.divisor, conversion.factor, dtype)
    if conversion.is_complex:
        return scaled(combined.reshape(-1).view(dtype).reshape(combined.shape[:-1]), conversion.factor)
    if conversion.divisor != 1 and conversion.factor != 1.0:
        return average_of_halves(halves(combined), conversion.divisor, conversion.factor, dtype)
    if conversion.divisor != 1:
        # `//` rounds towards minus infinity. Negating twice makes the division truncate negative numbers exactly.
        found = np.where(combined < 0, -(-combined // conversion.divisor), combined // conversion.divisor)
        return found.astype(dtype)
    return scaled(combined, conversion.factor).astype(dtype, copy=False)


def scaled(array: NDArray[Any], factor: float) -> NDArray[Any]:
    """Return `array` times `factor`.

    Integer results are truncated, and 16-bit floats are multiplied in float32.
    """
    if factor == 1.0:
        return array
    kind = array.dtype
    if kind.name in {"float16", "bfloat16"}:
        return np.asarray((array.astype(np.float32) * np.float32(factor)).astype(kind))
    return np.asarray(array * kind.type(factor)) if kind.kind in "fc" else scaled_integers(array, factor)


def neutral_array(conversion: DtypeConversion, elements: int) -> "np.ndarray[Any, np.dtype[Any]]":
    """Return a flat array of neutral elements, such as zeros for sum and average."""
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
