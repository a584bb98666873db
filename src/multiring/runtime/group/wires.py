"""Wire types as a user meets them: what an array is behind one."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from multiring import _native
from multiring.errors import ArgumentError
from multiring.schedule import wire_of


def round_trip(array: Any, wire: str | None) -> NDArray[np.float32]:
    """Return what is left of `array` when it has travelled as `wire`: a new array of the same shape and strides' order.

    What `all_reduce(..., wire=wire)` sends of a contribution arrives as this, and a round trip once more changes
    nothing: so the difference is what error feedback has to keep. No other rank takes part.

    Args:
        array: NumPy, float32, any shape.
        wire: "fp16", "bf16" or "int8"; None loses nothing.

    Raises:
        ArgumentError: another array, or no such wire type.
    """
    if not isinstance(array, np.ndarray) or array.dtype != np.float32:
        kind = array.dtype if isinstance(array, np.ndarray) else type(array).__name__
        raise ArgumentError(f"round_trip of {kind}: want a NumPy array of float32")
    found: NDArray[np.float32] = array.copy(order="K")
    address = found.ctypes.data
    _native.round_trip(_native.Wire(int(wire_of(wire))), address, address, found.size)
    return found
