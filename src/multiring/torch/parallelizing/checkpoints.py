"""The state of a parallel model and its optimizer, in the form of one process.

Checkpoints of this form can be loaded on any mesh. Each parameter is put together from the ranks' parts. The state of a
pipeline contains all stages, in the order of the model. Parameters have the numbers that an optimizer of the whole
model would give them if its groups list them in the model's order. Every rank has to call each of these functions.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import distribute_tensor
from torch.utils._pytree import tree_map

from multiring._frontend.checkpoint.framework import SavedState
from multiring.errors import ArgumentError, MismatchError
from multiring.torch.checkpoint.modules import BUFFERS, load_module, matched, state_of_module, unwrapped
from multiring.torch.parallelizing.held import Held, is_dtensor, whole

State = dict[str, Any]


def whole_state(module: nn.Module, held: Held) -> State:
    """Return the state of the whole model, of which `module` is this rank's part.

    Raises:
        MismatchError: another stage of a pipeline failed to return its state.
    """
    return _merged(held, "save", lambda: {name: whole(value) for name, value in module.state_dict().items()})


def whole_module_state(module: nn.Module, held: Held) -> SavedState:
    """Return a pipeline model's state for a checkpoint.

    It contains the state_dict and the buffers outside the state_dict.
    """
    beside = _merged(held, "save", lambda: dict(state_of_module(module).beside or {}).get(BUFFERS, {}))
    return SavedState(whole_state(module, held), None, {BUFFERS: beside} if beside else None)


def load_whole_state(module: nn.Module, held: Held, state: Mapping[str, Any]) -> None:
    """Load this rank's part of the whole model's state into `module`.

    Raises:
        ArgumentError: a name is missing or unknown, or a shape differs. Every rank raises it.
        MismatchError: another stage of a pipeline could not load its part.
    """
    load_whole_module(module, held, SavedState(state))


def load_whole_module(module: nn.Module, held: Held, saved: SavedState) -> None:
    """Load this rank's part of a checkpoint of the whole model into `module`.

    The checkpoint may come from any mesh, and from a model in wrappers.

    Raises:
        ArgumentError: a name is missing or unknown, or a shape differs. Every rank raises it.
        MismatchError: another stage of a pipeline could not load its part.
    """
    own, names = module.state_dict(), _saved_names(module, held, saved.shared)
    shared = {name: saved.shared[names[name]] for name in own}
    _refuse_other_shapes(own, shared, held)
    mine = {name: saved.own[names[name]] for name in own if names[name] in (saved.own or {})}
    buffers = {name for name, _ in module.named_buffers()}
    everything = dict((saved.beside or {}).get(BUFFERS, {}))
    beside = {short: each for name, each in everything.items() if (short := unwrapped(name)) in map(unwrapped, buffers)}
    _told_by_stages(held, "load", lambda: load_module(module, SavedState(shared, mine or None, {BUFFERS: beside})))


def _saved_names(module: nn.Module, held: Held, state: Mapping[str, Any]) -> dict[str, str]:
    known = [name for names in _of_stages(list(module.state_dict()), held) for name in names]
    names = matched(known, state)
    theirs = set(names.values())
    for what, others in (("lacks", theirs - set(state)), ("has the unknown", set(state) - theirs)):
        if others:
            raise ArgumentError(f"load: the state belongs to another model: it {what} {min(others)!r}")
    return names


def _refuse_other_shapes(own: State, given: State, held: Held) -> None:
    """Raise ArgumentError on every rank if a tensor of `given` has a different shape than in the model."""
    found = next(
        (
            f"load: {name} has shape {tuple(given[name].shape)} in the state, but {tuple(mine.shape)} in the model"
            for name, mine in own.items()
            if isinstance(mine, Tensor) and isinstance(given[name], Tensor) and mine.shape != given[name].shape
        ),
        None,
    )
    for each in _of_stages(found, held):
        if each is not None:
            raise ArgumentError(each)


def whole_optimizer_state(optimizer: torch.optim.Optimizer, held: Held, state: State, stages_key: str) -> State:
    """Turn this rank's optimizer `state` into that of the whole model's optimizer.

    Raises:
        ArgumentError: the stages' optimizers have different groups, or the optimizer has a moving average.
    """
    attached = dict(state.get(stages_key, {}))
    if "average" in attached:
        raise ArgumentError(
            f"save: the optimizer has a moving average of a model under {held.parallelism}, and each rank has only a "
            "part of the average; save the model within average.applied(), and the optimizer before moving_average "
            "is attached"
        )
    numbers = _numbers(optimizer, held)
    told: list[dict[int, Any]] = [
        {numbers[number]: tree_map(whole, each) for number, each in state["state"].items()},
        {numbers[int(n)]: whole(each) for n, each in attached.get("lag", {}).get("pending", {}).items()},
    ]
    kept: dict[int, Any] = {}
    pending: dict[int, Any] = {}
    for part_kept, part_pending in _of_stages(told, held):
        kept.update(part_kept)
        pending.update(part_pending)
    if "lag" in attached:
        attached["lag"] = {**attached["lag"], "pending": {str(n): each for n, each in sorted(pending.items())}}
    groups = [
        {**group, "params": members}
        for group, members in zip(state["param_groups"], _members(optimizer, held), strict=True)
    ]
    found = {**state, "state": dict(sorted(kept.items())), "param_groups": groups}
    return {**found, stages_key: attached} if stages_key in state else found


def load_whole_optimizer(optimizer: torch.optim.Optimizer, held: Held, state: State, stages_key: str) -> None:
    """Load this rank's part of a whole model's optimizer `state` into `optimizer`.

    Raises:
        ArgumentError: the state has a different number of parameters. Every rank raises it.
        MismatchError: another stage of a pipeline could not load its part.
    """
    own = _own_optimizer_state(optimizer, held, state, stages_key)
    _told_by_stages(held, "load", lambda: optimizer.load_state_dict(own))


def _own_optimizer_state(optimizer: torch.optim.Optimizer, held: Held, state: State, stages_key: str) -> State:
    """Return the part of a whole model's optimizer `state` that `optimizer` has to load.

    Raises:
        ArgumentError: the state has a different number of parameters.
    """
    members = _members(optimizer, held)
    found = [len(group["params"]) for group in state["param_groups"]]
    if found != [len(each) for each in members]:
        raise ArgumentError(
            f"load: the parameter groups of the checkpoint's optimizer have {found} parameters; this optimizer's "
            f"groups, over all stages, have {[len(each) for each in members]}"
        )
    by_number = {int(number): each for number, each in state["state"].items()}
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    numbers = _numbers(optimizer, held)
    # The parameters' numbers in the state, in the order of the groups.
    names = [int(name) for group in state["param_groups"] for name in group["params"]]
    own: dict[int, Any] = {}
    for place, parameter in enumerate(parameters):
        kept = by_number.get(names[numbers[place]])
        if kept is not None:
            own[place] = tree_map(_spreads(parameter), kept)
    groups, place = [], 0
    for group, mine in zip(state["param_groups"], optimizer.param_groups, strict=True):
        groups.append({**group, "params": list(range(place, place + len(mine["params"])))})
        place += len(mine["params"])
    result = {**state, "state": own, "param_groups": groups}
    attached = dict(state.get(stages_key, {}))
    if "lag" in attached:
        waiting = attached["lag"].get("pending", {})
        mine_waiting = {
            str(place): _spreads(parameter)(waiting[str(numbers[place])])
            for place, parameter in enumerate(parameters)
            if str(numbers[place]) in waiting
        }
        result[stages_key] = {**attached, "lag": {**attached["lag"], "pending": mine_waiting}}
    return result


def _merged(held: Held, doing: str, work: Callable[[], State]) -> State:
    """Return the union of the dictionaries that `work` returns on all stages."""
    return {name: value for part in _told_by_stages(held, doing, work) for name, value in part.items()}


def _told_by_stages(held: Held, doing: str, work: Callable[[], Any]) -> list[Any]:
    """Run `work` on each stage, and return the results of all stages.

    If one stage fails, all stages raise, so that no stage waits for another one later.

    Raises:
        MismatchError: another stage failed.
    """
    found, failure = None, None
    try:
        found = work()
    except Exception as error:  # noqa: BLE001 -- raised below, after the other stages have received it
        failure = error
    told = _of_stages((None if failure is None else f"{type(failure).__name__}: {failure}", found), held)
    if failure is not None:
        raise failure
    for stage, (reason, _) in enumerate(told):
        if reason is not None:
            raise MismatchError(f"{doing}: stage {stage} of the pipeline failed with {reason}")
    return [each for _, each in told]


def _of_stages(own: Any, held: Held) -> list[Any]:
    """Gather `own` from all stages of a pipeline, in their order."""
    if held.stages is None:
        return [own]
    found: list[Any] = [None] * held.stages.size()
    dist.all_gather_object(found, own, group=held.stages)
    return found


def _counts(optimizer: torch.optim.Optimizer, held: Held) -> list[list[int]]:
    """Return the number of parameters of each group of each stage."""
    counts: list[list[int]] = _of_stages([len(group["params"]) for group in optimizer.param_groups], held)
    if len(set(map(len, counts))) > 1:
        raise ArgumentError(
            f"the stages' optimizers have {[len(each) for each in counts]} parameter groups: want equally many on all, "
            "so that a checkpoint has one optimizer of the whole model"
        )
    return counts


def _members(optimizer: torch.optim.Optimizer, held: Held) -> list[list[int]]:
    """Return each group's parameter numbers in an optimizer of the whole model."""
    totals = [sum(each) for each in zip(*_counts(optimizer, held), strict=True)]
    starts = [sum(totals[:at]) for at in range(len(totals))]
    return [list(range(start, start + total)) for start, total in zip(starts, totals, strict=True)]


def _numbers(optimizer: torch.optim.Optimizer, held: Held) -> list[int]:
    """Return the numbers of this rank's parameters in an optimizer of the whole model."""
    counts = _counts(optimizer, held)
    stage = 0 if held.stages is None else held.stages.rank()
    found: list[int] = []
    for at, members in enumerate(_members(optimizer, held)):
        before = sum(each[at] for each in counts[:stage])
        found += members[before : before + counts[stage][at]]
    return found


def _spread(value: Tensor, like: Any) -> Tensor:
    """Return this rank's part of `value`, with the placements of `like`; all ranks have the whole `value`."""
    if not is_dtensor(like):
        return value
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)


def _spreads(parameter: Any) -> Callable[[Any], Any]:
    def spread(value: Any) -> Any:
        if isinstance(value, Tensor) and value.dim() and tuple(value.shape) == tuple(parameter.shape):
            return _spread(value, parameter)
        return value

    return spread
