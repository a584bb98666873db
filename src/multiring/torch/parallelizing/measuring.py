"""Measure a model's step: the whole step for several batch sizes, and its parts."""

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

Call = tuple[tuple[Any, ...], dict[str, Any], Any]  # a module's positional arguments, keyword arguments and output
_TURNS = 4  # the shortest turn counts, because other load on the machine makes turns longer
# When all ranks compute at once, the mean of consecutive turns counts, because a single turn may have to wait for
# others.
_ROUNDS, _TURNS_OF_ROUND = 3, 3


@dataclass(frozen=True, slots=True)
class Cost:
    """Time of a module's forward and backward, and the memory that autograd keeps."""

    seconds: float = 0.0
    saved_bytes: int = 0


@contextmanager
def fork_random_numbers() -> Iterator[None]:
    """Restore the random number generators of torch, NumPy and Python on exit."""
    python, arrays = random.getstate(), np.random.get_state()  # noqa: NPY002 -- programs use this generator
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(arrays)  # noqa: NPY002 -- as above


@contextmanager
def undone(model: nn.Module) -> Iterator[None]:
    """Restore a model and the random number generators on exit; delete gradients.

    It restores parameters, buffers (including those that a forward assigns or adds), and plain attributes of modules,
    such as counters and caches.
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
    """Return arguments and output of each call of `modules` in a forward of `model`."""
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
    """Measure all `calls` of `module`, one by one.

    With `wants_gradient`, the time includes the gradient of the module's inputs.
    """
    seconds, kept = 0.0, 0
    for args, kwargs, _ in calls:
        mine = {each.untyped_storage().data_ptr() for each in module.parameters()}
        kept += _kept_bytes(module, args, kwargs, mine)
        turns = [_turn(module, *_fresh((args, kwargs), wants_gradient=wants_gradient)) for _ in range(_TURNS)]
        seconds += min(turn.seconds for turn in turns)
    return Cost(seconds, kept)


def together(model: nn.Module, inputs: tuple[Tensor, ...], samples: int) -> Compute:
    """Return the slowest rank's time of forward and backward while all ranks compute.

    Every rank calls it.
    """
    given = part_of(inputs, samples)
    rounds = []
    for _ in range(_ROUNDS):
        dist.barrier()
        rounds.append(_round(model, given))
    return Compute(samples, *slowest(*min(rounds, key=sum)))


def ascending(found: Sequence[Compute]) -> tuple[Compute, ...]:
    """Return measurements sorted by samples, with disturbances removed.

    No batch may take longer than a larger one, so each time is at most that of the next larger batch.
    """
    kept: list[Compute] = []
    for each in sorted(found, key=lambda compute: compute.samples, reverse=True):
        most = kept[-1] if kept else each
        kept.append(Compute(each.samples, min(each.forward_s, most.forward_s), min(each.backward_s, most.backward_s)))
    return tuple(reversed(kept))


def alone(model: nn.Module, inputs: tuple[Tensor, ...], samples: int) -> float:
    """Return seconds of forward and backward on rank 0 while no other rank computes.

    Every rank calls it.
    """
    given, found = part_of(inputs, samples), 0.0
    dist.barrier()
    if dist.get_rank() == 0:
        found = min(sum(_round(model, given)) for _ in range(_ROUNDS))
    dist.barrier()
    return slowest(found)[0]


def slowest(*seconds: float) -> list[float]:
    """Return the maximum over all ranks of each value. Every rank calls it."""
    told = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(told, dist.ReduceOp.MAX)
    found: list[float] = told.tolist()
    return found


def part_of(inputs: tuple[Tensor, ...], samples: int) -> tuple[Tensor, ...]:
    """Return the first `samples` of `inputs`."""
    return tuple(each[:samples] for each in inputs)


def batch_of(inputs: tuple[Any, ...]) -> int:
    """Return the number of samples in `inputs`.

    Raises:
        ArgumentError: `inputs` are not tensors with the same first dimension.
    """
    sizes = {each.shape[0] if isinstance(each, Tensor) and each.dim() else None for each in inputs}
    if len(sizes) != 1 or None in sizes or 0 in sizes:
        raise ArgumentError(
            f"sample with first dimensions {sorted(map(str, sizes))}: want the batch of all ranks, as a tensor or a "
            "tuple of tensors whose first dimension counts its samples"
        )
    return int(sizes.pop() or 0)


def _round(model: nn.Module, given: tuple[Tensor, ...]) -> tuple[float, float]:
    """Return the mean seconds of forward, and of backward, over several consecutive turns."""
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
    """Return the bytes that autograd keeps for backward, except the storages in `not_these`."""
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in not_these:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    args, kwargs = _fresh((args, kwargs), wants_gradient=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = module(*args, **kwargs)  # kept alive until all is counted, so no storage reuses its address
    del outputs
    return sum(kept.values())


def _detached(tree: Any) -> Any:
    return tree_map(lambda each: each.detach() if isinstance(each, Tensor) else each, tree)


def _fresh(tree: Any, *, wants_gradient: bool) -> Any:
    """Return a copy of `tree` whose tensors have no computation history."""

    def fresh(each: Any) -> Any:
        if not isinstance(each, Tensor):
            return each
        leaf = each.detach().clone().requires_grad_(wants_gradient and each.is_floating_point())
        return leaf.clone()  # a copy, because modules that work in place cannot write to a leaf

    return tree_map(fresh, tree)
