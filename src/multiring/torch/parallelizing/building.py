"""Apply a parallelism by DistributedDataParallel, fully_shard or DTensor plans."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from multiring.planner.parallelism import Unit, gathered_together
from multiring.torch.parallelizing.anatomy import ModelUnit, Split
from multiring.torch.parallelizing.held import is_dtensor, local

_SPARE = "_multiring_spare"


def equalise(model: nn.Module) -> None:
    """Broadcast rank 0's parameters and buffers. Every rank calls it."""
    with torch.no_grad():
        for each in (*model.parameters(), *model.buffers()):
            own = each.detach()
            told = own.contiguous()  # backends need a contiguous tensor, which channels_last is not
            dist.broadcast(told, 0)
            if told is not own:
                own.copy_(told)


def replicated(model: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    """Return the model with gradients averaged during backward."""
    options: dict[str, Any] = {"process_group": group, "gradient_as_bucket_view": True}
    if all(type(each).__module__.startswith("torch.nn.") for each in model.modules()):
        return DistributedDataParallel(model, **options)
    # A program's own forward may skip different parameters on each rank and at each call, so torch must search for
    # unused parameters. torch warns if the search finds none. A spare parameter that no layer uses prevents this
    # warning.
    first = next(iter(model.parameters()))
    model.register_parameter(_SPARE, nn.Parameter(torch.zeros(1, dtype=first.dtype)))
    found = DistributedDataParallel(model, find_unused_parameters=True, **options)
    delattr(model, _SPARE)
    return found


def sharded(model: nn.Module, parts: tuple[ModelUnit, ...], units: tuple[Unit, ...], mesh: DeviceMesh) -> nn.Module:
    """Return the model, sharded over the last axis of `mesh`.

    If `mesh` has another axis, the model is replicated over it.
    """
    for group in gathered_together(units)[1:]:
        modules = [parts[index].module for index in group]
        for module in modules:
            if module is not None and module is not model:
                fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if dist.get_backend() == "gloo" and isinstance(model, FSDPModule):
        # Gloo's average in a reduce-scatter is wrong without this: https://github.com/pytorch/pytorch/issues/162338
        model.set_force_sum_reduction_for_comms(True)
    return model


def divided(model: nn.Module, splits: Mapping[str, Split], mesh: DeviceMesh) -> nn.Module:
    """Return the model, with the layers of `splits` divided over the axis of `mesh`."""
    # All ranks have the same parameters, so each takes its part without communication.
    return parallelize_module(model, mesh, {name: _style(split) for name, split in splits.items()}, src_data_rank=None)


def _style(split: Split) -> ParallelStyle:
    if split is Split.COLUMN:
        return ColwiseParallel()
    return RowwiseParallel() if split is Split.ROW else ColwiseParallel(output_layouts=Replicate())


def average_gradients(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Average this rank's parts of all gradients over `group`, one buffer per type.

    A missing gradient counts as zero; if a parameter has no gradient on any rank, it gets none.
    """
    trained = [each for each in parameters if each.requires_grad]
    if not trained:
        return
    having = torch.tensor([each.grad is not None for each in trained], dtype=torch.int32)
    dist.all_reduce(having, dist.ReduceOp.MAX, group=group)
    by_type: dict[torch.dtype, list[Tensor]] = {}
    for parameter, has in zip(trained, having.tolist(), strict=True):
        if has:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            own = local(parameter.grad)
            by_type.setdefault(own.dtype, []).append(own)
    for gradients in by_type.values():
        flat = torch.cat([each.reshape(-1) for each in gradients])
        dist.all_reduce(flat, group=group)
        flat.div_(group.size())
        for gradient, averaged in zip(gradients, torch.split(flat, [each.numel() for each in gradients]), strict=True):
            gradient.copy_(averaged.view_as(gradient))


def settle_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Redistribute each gradient to its parameter's placements.

    torch leaves some gradients as sums that have not been reduced yet.
    """
    for each in parameters:
        gradient = each.grad
        if is_dtensor(each) and is_dtensor(gradient) and gradient.placements != each.placements:  # type: ignore[union-attr, attr-defined] # both are DTensors
            each.grad = gradient.redistribute(placements=each.placements)  # type: ignore[union-attr, attr-defined] # both are DTensors
