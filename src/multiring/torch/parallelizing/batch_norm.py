"""Batch norm over the samples of all data ranks, with torch.distributed."""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

_BATCH_NORMS = (nn.modules.batchnorm._BatchNorm,)  # noqa: SLF001 -- torch has no public base class of them


class _Summed(torch.autograd.Function):
    """The sum over all ranks. Its backward also sums, since each rank's result depends on every input."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, groups: Sequence[dist.ProcessGroup]) -> Tensor:
        ctx.groups = groups
        return _sum(value, groups)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _sum(gradients[0], ctx.groups), None


def _sum(value: Tensor, groups: Sequence[dist.ProcessGroup]) -> Tensor:
    told = value.clone(memory_format=torch.contiguous_format)
    for group in groups:
        dist.all_reduce(told, group=group)
    return told


class _Synchronised(nn.modules.batchnorm._BatchNorm):  # noqa: SLF001 -- as above
    """A batch norm that is synchronised over ranks.

    `synchronise_batch_norms` inserts this class before the original class of a module.
    """

    _groups: Sequence[dist.ProcessGroup] = ()
    _ranks: int = 1

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 -- torch's name
        """Normalise by the statistics of all ranks' samples; every rank has equally many."""
        if not self.training and self.running_mean is not None:
            return super().forward(input)
        self._check_input_dim(input)  # type: ignore[no-untyped-call] # torch does not annotate it
        dims = [0, *range(2, input.dim())]
        shape = [1, -1, *[1] * (input.dim() - 2)]
        # Two passes, because the difference of two large sums would lose the precision of float32.
        values = input if input.dtype in {torch.float32, torch.float64} else input.float()
        mean = self._mean_of_ranks(values.mean(dims))
        apart = values - mean.view(shape)
        variance = self._mean_of_ranks(apart.square().mean(dims))
        count = self._ranks * values.numel() // values.shape[1]
        if count == 1:
            raise ValueError(f"Expected more than 1 value per channel when training, got input size {input.size()}")
        if self.training:
            self._track(mean.detach(), variance.detach() * (count / (count - 1)))
        made: Tensor = apart * torch.rsqrt(variance + self.eps).view(shape)
        if self.affine:
            made = made * self.weight.view(shape) + self.bias.view(shape)
        return made.to(input.dtype)

    def _mean_of_ranks(self, own: Tensor) -> Tensor:
        total: Tensor = _Summed.apply(own, self._groups)  # type: ignore[no-untyped-call] # torch does not annotate it
        return total / self._ranks

    def _track(self, mean: Tensor, variance: Tensor) -> None:
        if not self.track_running_stats or self.running_mean is None or self.running_var is None:
            return
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        share = 1.0 / float(self.num_batches_tracked or 1) if self.momentum is None else self.momentum
        with torch.no_grad():
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
            self.running_var.lerp_(variance.to(self.running_var.dtype), share)


def restore_batch_norms(model: nn.Module) -> None:
    """Undo `synchronise_batch_norms`."""
    for module in model.modules():
        if isinstance(module, _Synchronised):
            module.__class__ = type(module).__mro__[2]


def synchronise_batch_norms(model: nn.Module, groups: Sequence[dist.ProcessGroup]) -> None:
    """Make batch norms normalise over the samples of all ranks of `groups`.

    The modules stay the same objects, and instances of their class. `groups` are axes of a mesh.
    """
    restore_batch_norms(model)
    for module in model.modules():
        if groups and isinstance(module, _BATCH_NORMS):
            kind = type(module)
            # The class stores the groups, because modules are copied and pickled, and groups cannot be.
            namespace = {
                "__doc__": kind.__doc__,
                "__module__": kind.__module__,
                "_groups": tuple(groups),
                "_ranks": math.prod(group.size() for group in groups),
            }
            module.__class__ = type(kind.__name__, (_Synchronised, kind), namespace)
