"""Convert a sample of any map-style data set to bytes and back, with the same types and values.

A value that could not be restored exactly raises an error when it is converted to bytes.
"""

import io
import json
import math
import re
import struct
from importlib import import_module
from typing import Any

import numpy as np

from multiring.data.readers.arrays import array_of, require_storable
from multiring.data.readers.limits import Limits, damage_told, library
from multiring.errors import DataError

_MODES = ("L", "RGB", "RGBA")  # Pillow's modes that follow from the shape of the image's array
_COUNT = struct.Struct("<I")
_PLAIN = frozenset({bool, int, float, str})
_TENSOR_TYPE = re.compile(r"(bool|bfloat16|(u?int|float|complex)\d+\w*)")
_TENSORS = "torch.Tensor"


def packed(sample: Any) -> bytes:
    """Return a sample as bytes.

    They contain the sample's structure as JSON and then its arrays and bytes, each with its length before it.

    Args:
        sample: a sample of the types that `cached` allows.

    Raises:
        DataError: the sample has a value of another type, or a part that is too large to be read back.
    """
    parts: list[bytes] = []
    try:
        head = json.dumps(_taken_apart(sample, parts)).encode()
    except (ValueError, RecursionError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"a sample cannot be cached: {str(error) or type(error).__name__}") from error
    for each in (head, *parts):
        if len(each) > Limits().record_bytes:
            raise DataError(
                f"a sample has a part of {len(each)} bytes, but a cache stores at most {Limits().record_bytes}"
            )
    return b"".join(piece for each in (head, *parts) for piece in (_COUNT.pack(len(each)), each))


def unpacked(data: bytes) -> Any:
    """Return the sample from a result of `packed`."""
    pieces = []
    place = 0
    with damage_told("a cached sample", ValueError, KeyError, IndexError, TypeError, AttributeError, struct.error):
        while place < len(data):
            (size,) = _COUNT.unpack_from(data, place)
            pieces.append(memoryview(data)[place + _COUNT.size : place + _COUNT.size + size])
            place += _COUNT.size + size
        return _put_together(json.loads(bytes(pieces[0])), pieces[1:])


def _taken_apart(value: Any, parts: list[bytes]) -> Any:
    """Return a value's structure for JSON, and append its arrays and bytes to `parts`."""
    # The exact type counts: an instance of a subclass would be restored with another type.
    kind: Any = type(value)
    if value is None or (kind in _PLAIN and not _has_surrogates(value)):
        return {"plain": value}
    if kind in {tuple, list}:
        return {kind.__name__: [_taken_apart(each, parts) for each in value]}
    if kind is dict and all(type(each) is str for each in value):
        if any(map(_has_surrogates, value)):
            return {"items": [[_taken_apart(each, parts) for each in pair] for pair in value.items()]}
        return {"dict": {key: _taken_apart(each, parts) for key, each in value.items()}}
    told = _part_of(value)
    parts.append(told.pop("data"))
    told["part"] = len(parts) - 1
    if told["kind"] == "image":
        told["info"] = _taken_apart(_kept_of(value.info), parts)
    return told


def _has_surrogates(value: Any) -> bool:
    """Return whether a value is text with lone surrogates: JSON would join two of them into one character."""
    if type(value) is not str or value.isascii():
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return True
    return False


def _kept_of(info: Any) -> dict[str, Any]:
    """Return the entries of an image's metadata that can be kept, for instance its orientation."""
    found = {}
    for name, value in info.items():
        try:
            _taken_apart({name: value}, [])
        except DataError:
            continue  # a type of an image library, which no pixel depends on
        found[name] = value
    return found


def _part_of(value: Any) -> dict[str, Any]:
    """Return the kind and the bytes of a value that is one piece of memory."""
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if type(value) is bytes:
        return {"kind": "bytes", "data": value}
    # NumPy arrays of bytes lose zeros at the end, so these are kept as plain bytes.
    if type(value) is np.bytes_:
        return {"kind": "numpy bytes", "data": bytes(value)}
    if isinstance(value, str) and type(value) in {str, np.str_}:
        name = "text" if type(value) is str else "numpy text"
        return {"kind": name, "data": value.encode("utf-8", "surrogatepass")}
    if kind.startswith("PIL.") and getattr(value, "mode", "") in _MODES:
        return {"kind": "image", "data": _npy(np.asarray(value))}
    if isinstance(value, np.generic) or type(value) in {np.ndarray, np.memmap}:
        require_storable("a sample", np.asarray(value))
        return {"kind": "scalar" if isinstance(value, np.generic) else "array", "data": _npy(np.asarray(value))}
    if kind == _TENSORS:
        return _tensor_part(value)
    mode = f" of mode {value.mode}" if kind.startswith("PIL.") and hasattr(value, "mode") else ""
    raise DataError(
        f"a sample holds a {kind}{mode}, which cannot be cached without a pickle: want arrays, tensors, numbers, text, "
        "bytes or images"
    )


def _tensor_part(value: Any) -> dict[str, Any]:
    """Return a tensor's type, shape and bytes."""
    torch = import_module("torch")  # torch is installed, because the sample is a tensor
    name = str(value.dtype).removeprefix("torch.")
    if value.layout != torch.strided or value.device.type != "cpu" or not _TENSOR_TYPE.fullmatch(name):
        raise DataError(
            f"a sample holds a tensor of {name}, {value.layout}, on {value.device}, which cannot be cached: want a "
            "dense tensor in the CPU's memory"
        )
    plain = value.detach().resolve_conj().resolve_neg().contiguous()
    data = plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
    told = {"kind": "tensor", "type": name, "shape": list(value.shape), "gradient": value.requires_grad}
    return told | {"data": data}


def _put_together(told: dict[str, Any], parts: list[memoryview]) -> Any:
    """Return the value from a result of `_taken_apart`."""
    (name, found), *_ = told.items()
    if name in {"tuple", "list"}:
        made = [_put_together(each, parts) for each in found]
        return tuple(made) if name == "tuple" else made
    if name == "dict":
        return {key: _put_together(each, parts) for key, each in found.items()}
    if name == "items":
        return {_put_together(key, parts): _put_together(each, parts) for key, each in found}
    if name == "plain":
        return found
    value = _made(told, bytes(parts[told["part"]]))
    if "info" in told:
        value.info = _put_together(told["info"], parts)
    return value


def _made(told: dict[str, Any], data: bytes) -> Any:
    kind = told["kind"]
    if kind in {"bytes", "numpy bytes"}:
        return data if kind == "bytes" else np.bytes_(data)
    if kind in {"text", "numpy text"}:
        text = data.decode("utf-8", "surrogatepass")
        return text if kind == "text" else np.str_(text)
    if kind == "tensor":
        return _tensor_of(told, data)
    array = array_of("a cached sample", data, Limits()).copy()
    if kind == "image":
        return library("PIL.Image").fromarray(array)
    return array[()] if kind == "scalar" else array


def _tensor_of(told: dict[str, Any], data: bytes) -> Any:
    if not _TENSOR_TYPE.fullmatch(told["type"]):
        raise ValueError(f"a tensor of {told['type']!r}")
    torch = import_module("torch")
    dtype, shape = getattr(torch, told["type"]), [int(each) for each in told["shape"]]
    if not math.prod(shape):
        return torch.empty(shape, dtype=dtype, requires_grad=told["gradient"])
    made = torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)
    return made.requires_grad_() if told["gradient"] else made


def _npy(array: Any) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array(file, np.ascontiguousarray(array).reshape(array.shape), allow_pickle=False)
    return file.getvalue()
