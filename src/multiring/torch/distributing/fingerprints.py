"""Fingerprints of samples, which show whether ranks read the same data."""

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

# The number of evenly spaced elements that are hashed of a tensor, array or list. They distinguish samples, and hashing
# them takes microseconds for any size.
LOOKED_AT = 1024
UNKNOWN = 0


def fingerprint(value: Any) -> int:
    """Return a hash from 1 to 2^63 - 1, or UNKNOWN if nothing is comparable.

    Args:
        value: tensors in host memory or on CUDA devices, for which the call waits; arrays, strings, bytes, numbers, and
            lists, tuples and mappings of them.
            Any other object contributes only the name of its type.
    """
    digest = hashlib.blake2b(digest_size=8)
    if not _absorb(digest, value):
        return UNKNOWN
    return int.from_bytes(digest.digest(), "little") >> 1 | 1


def _absorb(digest: Any, value: Any) -> bool:
    """Hash `value` into `digest`; return whether the hash depends on more than its type."""
    digest.update(type(value).__name__.encode())
    if isinstance(value, Tensor):
        return _absorb_tensor(digest, value)
    if isinstance(value, np.ndarray | np.generic) or hasattr(value, "__array_interface__"):
        return _absorb_array(digest, np.asarray(value))
    if isinstance(value, str | bytes | int | float | complex):
        digest.update(repr(value).encode())
        return True
    if isinstance(value, Mapping):
        return _absorb_all(digest, [each for pair in value.items() for each in pair])
    if isinstance(value, list | tuple):
        return _absorb_all(digest, value[:: _stride(len(value))])
    return False


def _absorb_all(digest: Any, values: Iterable[Any]) -> bool:
    tells = False
    for each in values:
        tells |= _absorb(digest, each)
    return tells


def _absorb_tensor(digest: Any, tensor: Tensor) -> bool:
    digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    if tensor.device.type not in {"cpu", "cuda"} or tensor.layout is not torch.strided or tensor.is_quantized:
        return False
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    digest.update(flat[:: _stride(len(flat))].contiguous().cpu().view(torch.uint8).numpy().tobytes())
    return len(flat) > 0


def _absorb_array(digest: Any, array: np.ndarray[Any, Any]) -> bool:
    digest.update(f"{array.dtype} {array.shape}".encode())
    flat = array.reshape(-1)
    looked_at = flat[:: _stride(len(flat))]
    if array.dtype.hasobject:
        return _absorb_all(digest, looked_at.tolist())
    digest.update(looked_at.tobytes())
    return len(flat) > 0


def _stride(count: int) -> int:
    return max(1, count // LOOKED_AT)
