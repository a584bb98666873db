"""The structure of a model: its units, and layers that a tensor axis can divide."""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

from torch import nn

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
# These layers treat each feature by itself, so a rank can apply them to its own features alone.
_ELEMENTWISE = (
    nn.ReLU, nn.ReLU6, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Identity, nn.LeakyReLU, nn.ELU, nn.Softplus, nn.Mish,
    nn.Hardswish, nn.Hardtanh,
)  # fmt: skip
_DROPOUTS = (nn.modules.dropout._DropoutNd, nn.RNNBase, nn.MultiheadAttention)  # noqa: SLF001 -- torch has no public base class of them
_BATCH_NORMS = (nn.modules.batchnorm._BatchNorm,)  # noqa: SLF001 -- as above
_PAIR_LEAST_BYTES = 1 << 18  # least size of two layers divided together: smaller ones are not worth two exchanges
_ALONE_LEAST_BYTES = 1 << 20  # least size of a layer that is divided alone


class Split(Enum):
    """How a layer is divided.

    Unless stated otherwise, ranks have all input and output features.
    """

    COLUMN = "column"  # each rank computes its own features, and keeps them
    ROW = "row"  # each rank reads its own features; the results are summed
    GATHERED = "gathered"  # each rank computes its own features; the results are gathered


@dataclass(frozen=True, slots=True)
class ModelUnit:
    """A unit: its name in the model, and its module.

    The module is None for the parameters of the model itself.
    """

    name: str
    module: nn.Module | None


@dataclass(frozen=True, slots=True)
class Anatomy:
    """The structure of a model.

    Attributes:
        parts: the model's units, in their order.
        splits: the layers that a tensor axis divides, by name.
        divisor: number that the size of a tensor axis must divide.
        refused: the axes that the model cannot have, with the reason.
    """

    parts: tuple[ModelUnit, ...]
    splits: MappingProxyType[str, Split]
    divisor: int
    refused: MappingProxyType[str, str]


def anatomy_of(model: nn.Module, ranks: int) -> Anatomy:
    """Return the structure of `model`, with layers that `ranks` ranks can divide."""
    parts = [*_parts(model, "")]
    if not parts:
        parts = [ModelUnit("", model)]
    elif next(model.parameters(recurse=False), None) is not None:
        parts.insert(0, ModelUnit("", None))
    splits, divisor = _splits(model, ranks)
    return Anatomy(tuple(parts), MappingProxyType(splits), divisor, MappingProxyType(_refused(model, parts, splits)))


def modules_below(model: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the unit `name` and all modules in it, with their names in the model."""
    for below, module in model.get_submodule(name).named_modules():
        yield ".".join(filter(None, (name, below))), module


def _parts(module: nn.Module, prefix: str) -> Iterator[ModelUnit]:
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if type(child) in _CONTAINERS:
            yield from _parts(child, f"{path}.")
        else:
            yield ModelUnit(path, child)


def _refused(model: nn.Module, parts: list[ModelUnit], splits: dict[str, Split]) -> dict[str, str]:
    found = {}
    times = Counter(id(each) for _, each in model.named_parameters(remove_duplicate=False))
    shared = [name for name, each in model.named_parameters() if times[id(each)] > 1]
    if not is_sequence(model):
        found["pipeline"] = "the model is not an nn.Sequential, so the order in which its parts run is unknown"
    elif len(parts) == 1:
        found["pipeline"] = "the model has one part"
    normed = [name for name, module in model.named_modules() if isinstance(module, _BATCH_NORMS)]
    if normed:
        found.setdefault("pipeline", f"{normed[0]} would normalise over each microbatch separately")
    if not splits:
        found["tensor"] = "no nn.Linear or nn.Embedding is large enough, with a size that the ranks divide evenly"
    drawing = [name for name, module in model.named_modules() if isinstance(module, _DROPOUTS) and _draws(module)]
    if drawing:
        found["tensor"] = f"{drawing[0]} draws random numbers, and each rank would draw different ones"
    if shared:
        found["tensor"] = found["pipeline"] = f"{shared[0]} is used in more than one place"
    return found


def _draws(module: nn.Module) -> bool:
    return bool(getattr(module, "p", 0) or getattr(module, "dropout", 0))


def is_sequence(model: nn.Module) -> bool:
    """Return whether the model's forward runs the parts of `model` one after the other."""
    return isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward


def _splits(model: nn.Module, ranks: int) -> tuple[dict[str, Split], int]:
    found: dict[str, Split] = {}
    features: list[int] = []
    for path, module in model.named_modules():
        if type(module) is nn.Sequential:
            for (first, wide), (second, narrow) in _pairs(module):
                if wide.out_features % ranks == 0 and _bytes_of(wide) + _bytes_of(narrow) >= _PAIR_LEAST_BYTES:
                    found[_joined(path, first)], found[_joined(path, second)] = Split.COLUMN, Split.ROW
                    features.append(wide.out_features)
    for path, module in model.named_modules():
        if path not in found and _bytes_of(module) >= _ALONE_LEAST_BYTES and (made := _features(module)) % ranks == 0:
            found[path] = Split.GATHERED
            features.append(made)
    return {path: split for path, split in found.items() if path}, math.gcd(*features)


Placed = tuple[int, nn.Linear]


def _pairs(sequence: nn.Sequential) -> Iterator[tuple[Placed, Placed]]:
    """Yield pairs of linear layers with only elementwise layers between them; each layer is in at most one pair."""
    first: Placed | None = None
    for place, module in enumerate(sequence):
        if type(module) is nn.Linear and _has_its_own(module):
            if first is not None:
                yield first, (place, module)
            first = (place, module) if first is None else None
        elif not isinstance(module, _ELEMENTWISE):
            first = None


def _joined(path: str, place: int) -> str:
    return f"{path}.{place}" if path else str(place)


def _bytes_of(module: nn.Module) -> int:
    """Return the bytes of a layer's parameters; 0 if the layer cannot be divided."""
    if (type(module) is nn.Linear or (type(module) is nn.Embedding and _is_plain(module))) and _has_its_own(module):
        return sum(each.nbytes for each in module.parameters(recurse=False))
    return 0


def _has_its_own(module: nn.Module) -> bool:
    """Return whether a layer computes with its own weight and bias alone.

    Older reparametrizations replace them.
    """
    return {name for name, _ in module.named_parameters(recurse=False)} <= {"weight", "bias"} and not (
        module._forward_pre_hooks  # noqa: SLF001 -- torch has no other way to ask
    )


def _is_plain(module: nn.Embedding) -> bool:
    return module.max_norm is None and not module.sparse and not module.scale_grad_by_freq


def _features(module: nn.Module) -> int:
    return module.embedding_dim if isinstance(module, nn.Embedding) else int(module.out_features)  # type: ignore[arg-type] # an attribute of Linear
