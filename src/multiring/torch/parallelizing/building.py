"""A mix put to work by torch's own means: DistributedDataParallel, fully_shard, and plans of DTensors."""

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from multiring.planner.parallelism import Unit, gathered_together
from multiring.torch.parallelizing.anatomy import Part, Split


def equalise(model: nn.Module) -> None:
    """Give every rank the parameters and buffers of rank 0. Every rank calls it."""
    with torch.no_grad():
        for each in (*model.parameters(), *model.buffers()):
            own = each.detach()
            told = own.contiguous()  # which backends want, and channels_last is not
            dist.broadcast(told, 0)
            if told is not own:
                own.copy_(told)


def replicated(model: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    """Return the model with gradients averaged during backward."""
    return DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True)


def sharded(model: nn.Module, parts: tuple[Part, ...], units: tuple[Unit, ...], mesh: DeviceMesh) -> nn.Module:
    """Return the model with parameters sharded over the last axis of `mesh`, and replicated over another one."""
    for group in gathered_together(units)[1:]:
        modules = [parts[index].module for index in group]
        for module in modules:
            if module is not None and module is not model:
                fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if dist.get_backend() == "gloo" and isinstance(model, FSDPModule):
        # Its average is wrong in a reduce-scatter, until this is shut: https://github.com/pytorch/pytorch/issues/162338
        model.set_force_sum_reduction_for_comms(True)
    return model


def divided(model: nn.Module, splits: Mapping[str, Split], mesh: DeviceMesh) -> nn.Module:
    """Return the model with the layers of `splits` divided over the one axis of `mesh`."""
    # All ranks have the same parameters: each takes its part of its own.
    return parallelize_module(model, mesh, {name: _style(split) for name, split in splits.items()}, src_data_rank=None)


def _style(split: Split) -> ParallelStyle:
    if split is Split.COLUMN:
        return ColwiseParallel()
    return RowwiseParallel() if split is Split.ROW else ColwiseParallel(output_layouts=Replicate())


def average_gradients(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Average what this rank holds of all gradients over `group`, those of one type as one buffer.

    Parameters without a gradient, the same ones on all ranks, are left out.
    """
    by_type: dict[torch.dtype, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.requires_grad and parameter.grad is not None:
            own = local(parameter.grad)
            by_type.setdefault(own.dtype, []).append(own)
    for gradients in by_type.values():
        flat = torch.cat([each.reshape(-1) for each in gradients])
        dist.all_reduce(flat, group=group)
        flat.div_(group.size())
        for gradient, averaged in zip(gradients, torch.split(flat, [each.numel() for each in gradients]), strict=True):
            gradient.copy_(averaged.view_as(gradient))


def local(tensor: Tensor) -> Tensor:
    """Return what this rank holds of `tensor`."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor
