"""Carry a learning rate from a narrow model to a wider one: initial weights and parameter groups."""

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from multiring._arguments import require_number
from multiring.convergence.width_rules import Axes, WidthRules, width_rules
from multiring.errors import ArgumentError, UnsupportedError
from multiring.torch.parallelizing.held import is_dtensor

_INPUTS_FIRST = (
    nn.Embedding,
    nn.EmbeddingBag,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)


def carry_to_width(
    narrow: nn.Module,
    model: nn.Module,
    *,
    lr: float,
    weight_decay: float = 0.0,
    optimizer: str = "adam",
    axes: Mapping[str, Axes] | None = None,
) -> list[dict[str, Any]]:
    """Scale a wide model's initial weights, and return parameter groups for a narrow model's learning rate.

        groups = mt.carry_to_width(Net(width=64), model := Net(width=256), lr=best_rate_of_width_64)
        optimizer = torch.optim.AdamW(groups)

    Call it before training, and on every rank alike. It warns where the rules should not be trusted.

    Args:
        narrow: the narrow model with its initial weights, not trained. It stays as it is.
        model: the same model of a larger width, with its initial weights. Matrices that grow get the narrow model's
            root mean square, scaled by their rule; vectors, and what does not grow, stay.
        lr: the narrow model's learning rate.
        weight_decay: its decoupled weight decay. Parameters of one dimension get none.
        optimizer: "adam" for Adam, AdamW and NAdam, "sgd" for SGD.
        axes: for parameters of layers that torch does not have: the axes of outputs and of inputs, by name. By
            default they are (1, 0) for embeddings and transposed convolutions, and (0, 1) otherwise.

    Returns:
        Groups of parameters with equal `lr` and `weight_decay`.

    Raises:
        ArgumentError: the models do not have the same layers, a parameter of an unknown layer grows in one axis only,
            or an embedding is also a last layer.
        UnsupportedError: a parameter is a DTensor.
    """
    for which in (narrow, model):
        for name, each in which.named_parameters():
            if is_dtensor(each):
                raise UnsupportedError(
                    f"carry_to_width: parameter {name!r} is a DTensor: want whole models; call it first"
                )
    lr, weight_decay = require_number("lr", lr), require_number("weight_decay", weight_decay)
    rules = _rules(narrow, model, optimizer, dict(axes or {}))
    doubts = [*rules.doubts, *_head_doubts(narrow, model)]
    if doubts:
        warnings.warn(f"carry_to_width: {'; '.join(doubts)}", RuntimeWarning, stacklevel=2)
    before = dict(narrow.named_parameters())
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        rule = rules[name]
        if rule.kind != "fixed" and parameter.dim() > 1:
            _scale(name, parameter, before[name], rule.deviation)
        if parameter.requires_grad:
            decay = weight_decay * rule.decay if parameter.dim() > 1 else 0.0
            groups.setdefault((lr * rule.rate, decay), []).append(parameter)
    return [{"params": each, "lr": rate, "weight_decay": decay} for (rate, decay), each in groups.items()]


@torch.no_grad()
def _scale(name: str, parameter: nn.Parameter, narrow: nn.Parameter, factor: float) -> None:
    """Give a parameter the root mean square of the narrow model's, times a factor."""
    wanted, found = (
        float(narrow.double().square().mean().sqrt()) * factor,
        float(parameter.double().square().mean().sqrt()),
    )
    if found == 0 and wanted > 0:
        raise ArgumentError(
            f"parameter {name!r} is zero, but has values in the narrow model: want both as they are before training"
        )
    if found > 0:
        parameter.mul_(wanted / found)


def _rules(narrow: nn.Module, model: nn.Module, optimizer: str, axes: dict[str, Axes]) -> WidthRules:
    """Return the rules of a model's parameters.

    Raises:
        ArgumentError: a parameter is ambiguous.
    """
    shapes = [{name: tuple(each.shape) for name, each in part.named_parameters()} for part in (narrow, model)]
    known = dict(axes)
    owners: dict[int, list[str]] = {}
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            full = f"{prefix}.{name}" if prefix else name
            owners.setdefault(id(parameter), []).append(full)
            if isinstance(module, _INPUTS_FIRST) and parameter.dim() > 1:
                known.setdefault(full, (1, 0))
            elif not type(module).__module__.startswith("torch.nn."):
                _require_clear(full, shapes, axes)
    for names in owners.values():
        if len({known.get(each, (0, 1)) for each in names}) > 1:
            raise ArgumentError(
                f"parameters {' and '.join(names)} are one: as an embedding and as a last layer it would need two "
                "rates; want two parameters"
            )
    return width_rules(
        *shapes, optimizer=optimizer, axes={name: each for name, each in known.items() if name in shapes[1]}
    )


def _require_clear(name: str, shapes: list[dict[str, tuple[int, ...]]], axes: Mapping[str, Axes]) -> None:
    """Raise ArgumentError if a parameter of an unknown layer grows in one axis: it may be of inputs or of outputs."""
    narrow, full = (each.get(name, ()) for each in shapes)
    grown = [axis for axis, pair in enumerate(zip(narrow, full, strict=False)) if pair[0] != pair[1]]
    if name not in axes and len(full) > 1 and len(grown) == 1:
        raise ArgumentError(
            f"parameter {name!r} grows from {narrow} to {full} in axis {grown[0]} only, and its layer is not one of "
            f"torch's: name the axes of its outputs and inputs by axes={{{name!r}: (outputs, inputs)}}, with None for "
            "one that it lacks"
        )


def _head_doubts(narrow: nn.Module, model: nn.Module) -> list[str]:
    """Return a doubt if the heads of attention get wider."""
    sizes = [
        {each.head_dim for each in part.modules() if isinstance(each, nn.MultiheadAttention)}
        for part in (narrow, model)
    ]
    if sizes[0] == sizes[1]:
        return []
    grown = f"from {sorted(sizes[0])} to {sorted(sizes[1])}"
    return [f"heads of attention grow {grown}, and torch divides by the root of that: want more heads of one size"]
