"""The public function that shows how a wire type changes an array."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from multiring import _native
from multiring._schedule import wire_of
from multiring.errors import ArgumentError


def quantize_dequantize(array: Any, wire: str | None) -> NDArray[np.float32]:
    """Encode `array` as `wire`, decode it, and return the result as a new array.

    `all_reduce(..., wire=wire)` transmits a contribution as these values, and a second round trip does not change them.
    The difference from `array` is the error that error feedback must keep. No other rank takes part.

    Args:
        array: a NumPy array of float32, of any shape. The result has the same shape and order of strides.
        wire: a wire type such as "int8"; None returns an exact copy.

    Raises:
        ArgumentError: `array` is of another kind, or the wire type does not exist.
    """
    if not isinstance(array, np.ndarray) or array.dtype != np.float32:
        kind = array.dtype if isinstance(array, np.ndarray) else type(array).__name__
        raise ArgumentError(f"quantize_dequantize of {kind}: want a NumPy array of float32")
    found: NDArray[np.float32] = array.copy(order="K")
    address = found.ctypes.data
    _native.round_trip(_native.Wire(int(wire_of(wire))), address, address, found.size)
    return found
