"""The Open Inference Protocol's request and response: JSON, with the values as numbers or as bytes after the JSON.

https://github.com/kserve/open-inference-protocol, version 2; the binary form is its "binary tensor data extension".
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from multiring.vision.exporting.exported_files import ModelTensor
from multiring.vision.serving.refusals import BAD_REQUEST, FAILED, TOO_LARGE, RequestError

Arrays = dict[str, NDArray[Any]]
# The protocol's names of the types.
DATATYPES = {
    "bool": "BOOL",
    "float16": "FP16",
    "float32": "FP32",
    "float64": "FP64",
    **{f"{sign}int{bits}": f"{sign.upper()}INT{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)},
}
_BINARY_SIZE, _BINARY, _BINARY_ALL = "binary_data_size", "binary_data", "binary_data_output"
# Parameters of other extensions. A client that is not told would wait for an answer in its memory, or for a sequence.
_UNSUPPORTED = ("classification", "shared_memory_region", "sequence_id")
_MOST_DIMENSIONS, _MOST_SIZE = 16, 1 << 40


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorLimits:
    """The largest tensors of a request.

    Attributes:
        rows: the first dimension of an input.
        values: the values of an input.
        side: any other dimension of an input.
    """

    rows: int
    values: int
    side: int


@dataclass(frozen=True, kw_only=True, slots=True)
class InferenceRequest:
    """An inference request.

    Attributes:
        id: the client's name of the request, or "".
        inputs: the inputs by name.
        outputs: the names of the wanted outputs, and whether each is sent as bytes.
    """

    id: str
    inputs: Arrays
    outputs: Mapping[str, bool]


def read_request(
    body: bytes,
    header_length: int | None,
    inputs: Sequence[ModelTensor],
    outputs: Sequence[ModelTensor],
    limits: TensorLimits,
) -> InferenceRequest:
    """Return the request that a body holds.

    Args:
        body: the whole body.
        header_length: the value of the header Inference-Header-Content-Length: the bytes of JSON at the start of the
            body. None: the body is JSON.
        inputs: the inputs of the model.
        outputs: the outputs of the model.
        limits: the largest tensors.

    Raises:
        RequestError: the body is malformed, or does not fit the model or the limits. The status is 400 or 413.
    """
    if header_length is not None and not 0 < header_length <= len(body):
        _refuse(f"Inference-Header-Content-Length {header_length}: want 1 to {len(body)}, the bytes of the body")
    told = parsed_json(body if header_length is None else body[:header_length])
    binary = memoryview(b"" if header_length is None else body)[header_length or 0 :]
    if not isinstance(told, dict):
        _refuse(f"the request is a JSON {type(told).__name__}: want an object")
    parameters = _parameters(told, "the request")
    by_name = {each.name: each for each in inputs}
    found: Arrays = {}
    place = 0
    for each in _objects(told, "inputs"):
        name = _name(each, by_name, "input")
        if name in found:
            _refuse(f"input {name!r} is given twice")
        size = _parameters(each, f"input {name!r}").get(_BINARY_SIZE)
        shape = _shape(each.get("shape"), by_name[name], limits)
        _require_datatype(each.get("datatype"), by_name[name])
        if size is None:
            found[name] = _from_numbers(each.get("data"), shape, by_name[name])
            continue
        if "data" in each:
            _refuse(f"input {name!r} has both data and {_BINARY_SIZE}: want one of them")
        data = _bytes_of(binary, place, size, shape, by_name[name])
        found[name] = np.frombuffer(data, _stored(by_name[name].dtype)).astype(by_name[name].dtype).reshape(shape)
        place += size
    if missing := sorted(set(by_name) - set(found)):
        _refuse(f"input {missing[0]!r} is missing: want {', '.join(sorted(by_name))}")
    if place != len(binary):
        _refuse(f"{len(binary)} bytes follow the JSON, and the inputs name {place}")
    request_id = told.get("id", "")
    if not isinstance(request_id, str) or len(request_id) > 1000 or not _is_unicode(request_id):
        _refuse("id: want a text of at most 1000 characters, without halves of surrogate pairs")
    _require_equal_rows(found)
    return InferenceRequest(id=request_id, inputs=found, outputs=_outputs(told, parameters, outputs))


def parsed_json(data: bytes) -> Any:
    """Return the value of a JSON text. NaN and Infinity, which are no JSON, are refused.

    Raises:
        RequestError: the text is no JSON, or nested too deeply.
    """
    try:
        return json.loads(data, parse_constant=_no_constant)
    except RecursionError:
        _refuse("the JSON is nested too deeply")
    except ValueError as error:  # UnicodeDecodeError is one
        _refuse(f"the body is no JSON: {str(error)[:200]}")


def write_response(
    head: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]], outputs: Mapping[str, bool], most: int
) -> tuple[bytes, int | None]:
    """Return the body of a response, and the bytes of JSON at its start if bytes of tensors follow.

    Args:
        head: the members of the response besides "outputs".
        arrays: the outputs by name.
        outputs: the wanted outputs, and whether each is sent as bytes.
        most: the most values that JSON may have.

    Raises:
        RequestError: an output has NaN or infinity, which JSON does not hold, or too many values for JSON.
    """
    told: list[dict[str, Any]] = []
    tail: list[bytes] = []
    for name, is_binary in outputs.items():
        array = np.ascontiguousarray(arrays[name])
        one: dict[str, Any] = {"name": name, "datatype": DATATYPES[array.dtype.name], "shape": list(array.shape)}
        if is_binary:
            data = array.astype(_stored(array.dtype.name), copy=False).tobytes()
            one["parameters"] = {_BINARY_SIZE: len(data)}
            tail.append(data)
        else:
            if array.size > most:
                text = f"output {name!r} has {array.size} values: want at most {most} as JSON; ask for bytes"
                raise RequestError(TOO_LARGE, text)
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                raise RequestError(
                    FAILED, f"output {name!r} has NaN or infinity, which JSON does not hold: ask for bytes"
                )
            one["data"] = array.reshape(-1).tolist()
        told.append(one)
    front = json.dumps({**head, "outputs": told}, ensure_ascii=False).encode()
    return (b"".join([front, *tail]), len(front)) if tail else (front, None)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _refuse(text: str) -> NoReturn:
    raise RequestError(BAD_REQUEST, text)


def _stored(dtype: str) -> np.dtype[Any]:
    """Return the type of the values in a body: little-endian."""
    stored: np.dtype[Any] = np.dtype(dtype).newbyteorder("<")
    return stored


def _parameters(told: Mapping[str, Any], what: str) -> Mapping[str, Any]:
    found = told.get("parameters", {})
    if not isinstance(found, dict):
        _refuse(f"parameters of {what}: want an object")
    for name in _UNSUPPORTED:
        if found.get(name):
            _refuse(f"{what}: the parameter {name} is not supported; leave it out")
    return found


def _objects(told: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    found = told.get(name)
    if not isinstance(found, list) or not found or not all(isinstance(each, dict) for each in found):
        _refuse(f"{name}: want a list of at least one object")
    return found


def _name(told: Mapping[str, Any], known: Mapping[str, ModelTensor], what: str) -> str:
    name = told.get("name")
    if not isinstance(name, str) or name not in known:
        _refuse(f"{what} {str(name)[:100]!r}: the model has only {', '.join(known)}")
    return name


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _shape(told: object, tensor: ModelTensor, limits: TensorLimits) -> tuple[int, ...]:
    if not isinstance(told, list) or len(told) > _MOST_DIMENSIONS or not all(type(each) is int for each in told):
        _refuse(f"shape of input {tensor.name!r}: want a list of whole numbers")
    shape = tuple(told)
    wanted = [-1 if size is None else size for size in tensor.shape]
    fits = len(shape) == len(wanted) and all(size in {-1, each} for size, each in zip(wanted, shape, strict=True))
    if not fits:
        _refuse(f"input {tensor.name!r} of the shape {list(shape)}: want {wanted}, where -1 is any size")
    if any(not 0 < each <= _MOST_SIZE for each in shape):
        _refuse(f"input {tensor.name!r} of the shape {list(shape)}: want sizes above 0")
    rows = shape[0] if shape else 1
    for what, value, most in (
        ("rows", rows, limits.rows),
        ("as its largest size", max(shape[1:], default=1), limits.side),
        ("values", math.prod(shape), limits.values),
    ):
        if value > most:
            raise RequestError(TOO_LARGE, f"input {tensor.name!r} has {value} {what}: want at most {most}")
    return shape


def _require_datatype(told: object, tensor: ModelTensor) -> None:
    wanted = DATATYPES[tensor.dtype]
    if told != wanted:
        _refuse(f"input {tensor.name!r} has the datatype {str(told)[:100]!r}: want {wanted}")


def _bytes_of(binary: memoryview, place: int, size: object, shape: tuple[int, ...], tensor: ModelTensor) -> memoryview:
    wanted = math.prod(shape) * np.dtype(tensor.dtype).itemsize
    if type(size) is not int or size != wanted:
        _refuse(
            f"input {tensor.name!r}: {_BINARY_SIZE} is {str(size)[:100]}, and its shape and type have {wanted} bytes"
        )
    if place + wanted > len(binary):
        _refuse(f"input {tensor.name!r} needs {wanted} bytes after the JSON, and {len(binary) - place} are left")
    data = binary[place : place + wanted]
    if tensor.dtype == "bool" and not (np.frombuffer(data, np.uint8) <= 1).all():
        _refuse(f"input {tensor.name!r}: want bytes of 0 and 1")
    return data


def _from_numbers(data: object, shape: tuple[int, ...], tensor: ModelTensor) -> NDArray[Any]:
    """Return the array of an input's JSON numbers, flat or nested."""
    if not isinstance(data, list):
        _refuse(f"input {tensor.name!r} has no data: want a list of numbers, or bytes with {_BINARY_SIZE}")
    flat = data
    for _ in range(len(shape)):
        if not flat or not isinstance(flat[0], list):
            break
        if not all(isinstance(each, list) for each in flat):
            _refuse(f"input {tensor.name!r}: want lists of numbers of one depth")
        flat = [value for each in flat for value in each]
    count = math.prod(shape)
    if len(flat) != count:
        _refuse(f"input {tensor.name!r} has {len(flat)} values: want {count} for the shape {list(shape)}")
    kinds: tuple[type, ...] = {"b": (bool,), "f": (float, int)}.get(np.dtype(tensor.dtype).kind, (int,))
    if not set(map(type, flat)) <= set(kinds):
        wrong = next(each for each in flat if type(each) not in kinds)
        _refuse(f"input {tensor.name!r} has the value {str(wrong)[:50]!r}: want {DATATYPES[tensor.dtype]}")
    found = _array_of(flat, np.dtype(tensor.dtype))
    if found is None:
        _refuse(f"input {tensor.name!r} has a value outside {DATATYPES[tensor.dtype]}")
    return found.reshape(shape)


def _array_of(flat: list[Any], dtype: np.dtype[Any]) -> NDArray[Any] | None:
    """Return numbers as an array of a type; None if the type does not hold one of them."""
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)  # NumPy 1 keeps the low bits of larger numbers
        return None if min(flat) < limits.min or max(flat) > limits.max else np.array(flat, dtype)
    try:
        wide = np.array(flat, np.float64 if dtype.kind == "f" else dtype)
    except OverflowError:
        return None
    with np.errstate(over="ignore"):
        found = wide.astype(dtype)
    return found if dtype.kind != "f" or np.isfinite(found).all() else None


def _require_equal_rows(inputs: Arrays) -> None:
    rows = {name: len(each) for name, each in inputs.items() if each.ndim}
    if len(set(rows.values())) > 1:
        _refuse(f"the inputs have {rows} rows: want equal numbers")


def _outputs(told: Mapping[str, Any], parameters: Mapping[str, Any], outputs: Sequence[ModelTensor]) -> dict[str, bool]:
    by_name = {each.name: each for each in outputs}
    is_binary = _flag(parameters, _BINARY_ALL, default=False)
    if "outputs" not in told or told["outputs"] == []:
        return dict.fromkeys(by_name, is_binary)
    wanted: dict[str, bool] = {}
    for each in _objects(told, "outputs"):
        name = _name(each, by_name, "output")
        own = _parameters(each, f"output {name!r}")
        if name in wanted:
            _refuse(f"output {name!r} is asked for twice")
        wanted[name] = _flag(own, _BINARY, default=is_binary)
    return wanted


def _flag(parameters: Mapping[str, Any], name: str, *, default: bool) -> bool:
    found = parameters.get(name, default)
    if type(found) is not bool:
        _refuse(f"parameter {name}: want true or false")
    return found
