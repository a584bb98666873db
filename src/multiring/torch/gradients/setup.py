"""The arguments of DistributedOptimizer, and the parameters that they select."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor

from multiring._arguments import whole
from multiring._frontend.process_sets import ProcessSet
from multiring._gradients.options import GradientOptions
from multiring.errors import ArgumentError
from multiring.torch.interop import described

Named = tuple[tuple[str, Tensor], ...]
Groups = int | tuple[tuple[Tensor, ...], ...] | None


@dataclass(frozen=True, slots=True)
class Setup:
    """The checked arguments of `DistributedOptimizer`."""

    options: GradientOptions
    named: Named | None
    groups: Groups
    process_set: ProcessSet


def require_optimizer(optimizer: Any) -> None:
    """Raise ArgumentError unless `optimizer` is a torch.optim.Optimizer."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ArgumentError(f"optimizer is a {type(optimizer).__name__}; want a torch.optim.Optimizer")


def named_from(named_parameters: Iterable[tuple[str, Tensor]]) -> Named:
    """Return `named_parameters` as a tuple; raise ArgumentError if they are not pairs, or a name occurs twice."""
    named = tuple(named_parameters)
    for each in cast("tuple[Any, ...]", named):
        if not (isinstance(each, tuple) and len(each) == 2 and isinstance(each[0], str)):
            raise ArgumentError(
                f"named_parameters has a {type(each).__name__}; want (name, tensor), as model.named_parameters() has"
            )
    names = Counter(name for name, _ in named)
    name, count = next(iter(names.most_common(1)), ("", 0))
    if count > 1:
        raise ArgumentError(f"named_parameters has {name} {count} times; want each name once")
    return named


def groups_from(groups: Any) -> Groups:
    """Return `groups`; raise ArgumentError unless it is a number, or lists of distinct parameters."""
    if groups is None:
        return None
    count = whole(groups)
    if count is not None:
        if count < 1:
            raise ArgumentError(f"groups={groups}: want a number of 1 or more, lists of parameters, or None")
        return count
    if not isinstance(groups, list | tuple) or not all(isinstance(group, list | tuple) for group in groups):
        raise ArgumentError(f"groups={groups!r}: want a number of 1 or more, a list of lists of parameters, or None")
    seen: set[int] = set()
    for each in (each for group in groups for each in group):
        if not isinstance(each, Tensor):
            raise ArgumentError(f"groups has a {type(each).__name__}; want parameters")
        if id(each) in seen:
            raise ArgumentError(f"groups has a parameter twice, {described(each)}; want each one once")
        seen.add(id(each))
    return tuple(tuple(group) for group in groups)


def together_of(parameters: Sequence[tuple[str, Tensor]], groups: Groups) -> list[list[int]]:
    """Return the indices of the parameters of each group; parameters that are not trained are omitted."""
    if groups is None:
        return []
    if isinstance(groups, int):
        groups = min(groups, max(1, len(parameters)))
        each, more = divmod(len(parameters), groups)
        ends = [number * each + min(number, more) for number in range(groups + 1)]
        found = [list(range(start, end)) for start, end in pairwise(ends)]
    else:
        places = {id(parameter): index for index, (_, parameter) in enumerate(parameters)}
        found = [[places[id(parameter)] for parameter in group if id(parameter) in places] for group in groups]
    return [members for members in found if members]


def trained(optimizer: torch.optim.Optimizer, named: Named | None) -> list[tuple[str, Tensor]]:
    """Return the optimizer's parameters that require a gradient. Parameters in `named` come first."""
    own = placed(optimizer)
    wanted = {id(parameter) for _, parameter in own if parameter.requires_grad}
    chosen: dict[int, tuple[str, Tensor]] = {}
    for name, parameter in [*(named or ()), *own]:
        if id(parameter) in wanted:
            chosen.setdefault(id(parameter), (name, parameter))
    return list(chosen.values())


def require_names(optimizer: torch.optim.Optimizer, named: Named) -> None:
    """Raise ArgumentError unless `named` has all of the optimizer's parameters."""
    known = {id(parameter) for _, parameter in named}
    for place, parameter in placed(optimizer):
        if id(parameter) not in known:
            raise ArgumentError(
                f"named_parameters lacks the optimizer's {place}, {described(parameter)}: is the optimizer another "
                "model's, or was it made before the model had this parameter? Make it of model.parameters(), and pass "
                "that model's named_parameters()"
            )


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the parameters of all groups of the optimizer."""
    return [parameter for _, parameter in placed(optimizer)]


def placed(optimizer: torch.optim.Optimizer) -> list[tuple[str, Tensor]]:
    """Return the optimizer's parameters, each with the expression that locates it in the optimizer."""
    return [
        (f'param_groups[{i}]["params"][{j}]', parameter)
        for i, param_group in enumerate(optimizer.param_groups)
        for j, parameter in enumerate(param_group["params"])
    ]
