"""What a model's step takes here: the whole of it for several batches, and its parts one by one."""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from multiring.errors import ArgumentError
from multiring.planner.parallelism import Compute
from multiring.torch.parallelizing.remembering import recall, remembered

Call = tuple[tuple[Any, ...], dict[str, Any], Any]  # what a module was given, and what it made of it
_TURNS = 4  # of which the shortest counts: what else a machine does makes them longer
# Turns of all ranks at once: the mean of those that follow each other, as one by itself may find the others waiting.
_ROUNDS, _TURNS_OF_ROUND = 3, 3


@dataclass(frozen=True, slots=True)
class Cost:
    """What one module takes for the samples it was given: forward and backward, and what autograd keeps."""

    seconds: float = 0.0
    saved_bytes: int = 0


@contextmanager
def fork_random_numbers() -> Iterator[None]:
    """Give torch, NumPy and Python their random numbers back at the end."""
    python, arrays = random.getstate(), np.random.get_state()  # noqa: NPY002 -- programs use it
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(arrays)  # noqa: NPY002 -- the same


@contextmanager
def undone(model: nn.Module) -> Iterator[None]:
    """Give the model back what a forward changes, and random numbers, when all is measured; gradients are gone.

    That is: parameters; buffers, also those that a forward assigns anew or adds; and plain attributes of modules, as
    counters and caches are.
    """
    kept = [(module, remembered(module)) for module in model.modules()]
    values = [(each, each.detach().clone()) for each in model.parameters()]
    with fork_random_numbers():
        try:
            yield
        finally:
            with torch.no_grad():
                for module, before in kept:
                    recall(module, before)
                for parameter, value in values:
                    if not torch.equal(parameter, value):
                        parameter.copy_(value)
            model.zero_grad(set_to_none=True)


def calls_of(model: nn.Module, inputs: tuple[Tensor, ...], modules: dict[str, nn.Module]) -> dict[str, list[Call]]:
    """Return how often each of `modules` is called in a forward of `model`, with what, and what comes of it."""
    found: dict[str, list[Call]] = {name: [] for name in modules}

    def hook(name: str) -> Callable[..., None]:
        return lambda _, args, kwargs, out: found[name].append((_detached(args), _detached(kwargs), _detached(out)))

    handles = [module.register_forward_hook(hook(name), with_kwargs=True) for name, module in modules.items()]
    try:
        with torch.no_grad():
            model(*(each.clone() for each in inputs))
    finally:
        for handle in handles:
            handle.remove()
    return found


def cost_of(module: nn.Module, calls: Sequence[Call], *, wants_gradient: bool = True) -> Cost:
    """Return what all `calls` of `module` take, one by one; `wants_gradient`: of what it is given, too."""
    seconds, kept = 0.0, 0
    for args, kwargs, _ in calls:
        mine = {each.untyped_storage().data_ptr() for each in module.parameters()}
        kept += _kept_bytes(module, args, kwargs, mine)
        turns = [_turn(module, *_fresh((args, kwargs), wants_gradient=wants_gradient)) for _ in range(_TURNS)]
        seconds += min(turn.seconds for turn in turns)
    return Cost(seconds, kept)


def together(model: nn.Module, inputs: tuple[Tensor, ...], samples: int) -> Compute:
    """Return what forward and backward take while all ranks compute: of the slowest rank. Every rank calls it."""
    given = part_of(inputs, samples)
    rounds = []
    for _ in range(_ROUNDS):
        dist.barrier()
        rounds.append(_round(model, given))
    return Compute(samples, *slowest(*min(rounds, key=sum)))


def ascending(found: Sequence[Compute]) -> tuple[Compute, ...]:
    """Return what was measured, by samples, where nothing takes longer than more samples do: disturbances are cut."""
    kept: list[Compute] = []
    for each in sorted(found, key=lambda compute: compute.samples, reverse=True):
        most = kept[-1] if kept else each
        kept.append(Compute(each.samples, min(each.forward_s, most.forward_s), min(each.backward_s, most.backward_s)))
    return tuple(reversed(kept))


def alone(model: nn.Module, inputs: tuple[Tensor, ...], samples: int) -> float:
    """Return the seconds of forward and backward on rank 0, while no other rank computes. Every rank calls it."""
    given, found = part_of(inputs, samples), 0.0
    dist.barrier()
    if dist.get_rank() == 0:
        found = min(sum(_round(model, given)) for _ in range(_ROUNDS))
    dist.barrier()
    return slowest(found)[0]


def slowest(*seconds: float) -> list[float]:
    """Return the largest of what all ranks measured, the same on all."""
    told = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(told, dist.ReduceOp.MAX)
    found: list[float] = told.tolist()
    return found


def part_of(inputs: tuple[Tensor, ...], samples: int) -> tuple[Tensor, ...]:
    """Return the first `samples` of `inputs`."""
    return tuple(each[:samples] for each in inputs)


def batch_of(inputs: tuple[Any, ...]) -> int:
    """Return how many samples `inputs` are.

    Raises:
        ArgumentError: they are not tensors with one first dimension.
    """
    sizes = {each.shape[0] if isinstance(each, Tensor) and each.dim() else None for each in inputs}
    if len(sizes) != 1 or None in sizes or 0 in sizes:
        raise ArgumentError(
            f"sample with first dimensions {sorted(map(str, sizes))}: want the batch of all ranks, as a tensor or a "
            "tuple of tensors whose first dimension counts its samples"
        )
    return int(sizes.pop() or 0)


def _round(model: nn.Module, given: tuple[Tensor, ...]) -> tuple[float, float]:
    """Return the mean seconds of forward, and of backward, of turns that follow each other."""
    turns = [_turn(model, tuple(each.clone() for each in given), {}) for _ in range(_TURNS_OF_ROUND)]
    return fmean(turn.forward_s for turn in turns), fmean(turn.backward_s for turn in turns)


def _turn(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Compute:
    begin = time.perf_counter()
    outputs = [each for each in tree_leaves(module(*args, **kwargs)) if isinstance(each, Tensor) and each.requires_grad]
    middle = time.perf_counter()
    if outputs:
        torch.autograd.backward(outputs, [torch.ones_like(each) for each in outputs])
    end = time.perf_counter()
    module.zero_grad(set_to_none=True)
    return Compute(0, middle - begin, end - middle)


def _kept_bytes(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], not_these: set[int]) -> int:
    """Return the bytes that autograd keeps between forward and backward, each storage once, without `not_these`."""
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in not_these:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    args, kwargs = _fresh((args, kwargs), wants_gradient=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = module(*args, **kwargs)  # lives until all is counted: no storage takes another's place
    del outputs
    return sum(kept.values())


def _detached(tree: Any) -> Any:
    return tree_map(lambda each: each.detach() if isinstance(each, Tensor) else each, tree)


def _fresh(tree: Any, *, wants_gradient: bool) -> Any:
    """Return `tree` with tensors that nothing was computed with yet."""

    def fresh(each: Any) -> Any:
        if not isinstance(each, Tensor):
            return each
        leaf = each.detach().clone().requires_grad_(wants_gradient and each.is_floating_point())
        return leaf.clone()  # in a leaf a module that works in place could not write

    return tree_map(fresh, tree)
