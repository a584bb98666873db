"""Batch normalisation over the samples of all ranks.

Forward: for each channel, a rank computes the count n, the mean m and the sum of squared deviations s of its samples.
One allgather exchanges these numbers. They are combined without a difference of large numbers:

    n = sum n_r      m = sum n_r m_r / n      s = sum s_r + sum n_r (m_r - m)^2

Backward: one allreduce sums dy and dy (x - m) over all samples.

Source: Chan, Golub & LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances", COMPSTAT
1982; Ioffe & Szegedy, "Batch normalization", ICML 2015 (section 3: the gradient).
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from multiring._frontend.errors import internal_errors
from multiring._frontend.process_sets import Members, ProcessSet, global_process_set, members_of
from multiring._runtime import Group
from multiring.errors import ArgumentError
from multiring.torch.autograd import outside_graphs
from multiring.torch.collectives.staged import declining_on_line, on_line, to_device
from multiring.torch.interop import refuse_unserved
from multiring.torch.parallelizing.held import refuse_held

_HALF = (torch.float16, torch.bfloat16)


class SyncBatchNorm(_BatchNorm):
    """Batch normalisation like torch's BatchNorm1d to 3d, over all ranks' samples.

    In training, every rank of the process set has to run each forward, and each backward that reaches the input. Ranks
    may have different numbers of samples, or none. Running means and variances are the same on all ranks. Gradients
    of weight and bias are those of this rank's own loss; a DistributedOptimizer averages them like any others.

    Args:
        num_features: channels C of the input, of shape (N, C, ...).
        eps: number added to the variance.
        momentum: weight of a batch in the running statistics; None for a plain mean of all batches.
        affine: whether the layer has a weight and a bias.
        track_running_stats: whether the layer keeps running statistics for evaluation. Without them, evaluation uses
            the statistics of the batch.
        process_set: the ranks; by default all ranks.

    Raises:
        ArgumentError: from forward: the input's shape is wrong, or a channel has only one value on all ranks together.
        UnsupportedError: from forward: the input is on a device that multiring does not serve.
        CollectiveError: from forward and backward: the ranks run different layers, or a rank is lost. Every rank
            raises it.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,  # noqa: FBT001, FBT002
        track_running_stats: bool = True,  # noqa: FBT001, FBT002
        process_set: ProcessSet = global_process_set,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self.process_set = process_set

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 -- torch's name
        """Return `input` normalised, with its shape and type."""
        self._check_input_dim(input)
        if self.track_running_stats and not self.training:
            return self._plain(input, self.running_mean, self.running_var, training=False)
        return self._of_all_ranks(input, tracks=self.track_running_stats)

    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002 -- torch's name
        if input.dim() < 2 or input.shape[1] != self.num_features:
            raise ArgumentError(
                f"SyncBatchNorm: input of shape {tuple(input.shape)}: expected at least 2D input, (N, C, ...) with "
                f"C = {self.num_features}"
            )
        refuse_unserved(input, "SyncBatchNorm's input")

    @outside_graphs
    def _of_all_ranks(self, values: Tensor, *, tracks: bool) -> Tensor:
        members = members_of(self.process_set)
        group = members.group
        if tracks and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        if group.size == 1:
            mean, variance = (self.running_mean, self.running_var) if tracks else (None, None)
            return self._plain(values, mean, variance, training=True)
        line = group.twin_for("SyncBatchNorm")
        statistics = _Statistics.of_all_ranks(members, line, values.detach())
        if tracks:
            self._track(statistics)
        output: Tensor = _Normalise.apply(values, self.weight, self.bias, statistics, self.eps, members, line)  # type: ignore[no-untyped-call] # torch does not annotate it
        return output

    def _share(self) -> float:
        """Return the weight of this batch in the running statistics."""
        if self.momentum is not None:
            return self.momentum
        return 0.0 if self.num_batches_tracked is None else 1.0 / max(1, int(self.num_batches_tracked))

    def _track(self, statistics: "_Statistics") -> None:
        if not statistics.count or self.running_mean is None or self.running_var is None:
            return
        share = self._share()
        unbiased = statistics.squares / (statistics.count - 1)
        with torch.no_grad():
            for running, found in ((self.running_mean, statistics.mean), (self.running_var, unbiased)):
                running.copy_(running.double().lerp_(found, share))

    def _plain(self, values: Tensor, mean: Tensor | None, variance: Tensor | None, *, training: bool) -> Tensor:
        """Return `values` normalised by this rank's own statistics, or by the given ones in evaluation."""
        return nn.functional.batch_norm(
            values, mean, variance, self.weight, self.bias, training, self._share() if training else 0.0, self.eps
        )


def convert_sync_batchnorm(module: nn.Module, process_set: ProcessSet = global_process_set) -> nn.Module:
    """Replace each BatchNorm layer of `module` by a SyncBatchNorm; return the module.

    If `module` itself is a BatchNorm layer, return a SyncBatchNorm. Parameters and running statistics stay the same
    tensors, so an optimizer of the module remains valid.

    Raises:
        ArgumentError: `parallelize` has put the module on the ranks.
    """
    refuse_held("convert_sync_batchnorm", module.parameters(), "it synchronises batch norms by itself")
    return _with_converted(module, process_set)


def _with_converted(module: nn.Module, process_set: ProcessSet) -> nn.Module:
    if isinstance(module, _BatchNorm) and not isinstance(module, SyncBatchNorm):
        return _converted(module, process_set)
    for name, child in module.named_children():
        setattr(module, name, _with_converted(child, process_set))
    return module


def _converted(layer: _BatchNorm, process_set: ProcessSet) -> SyncBatchNorm:
    found = SyncBatchNorm(
        *(layer.num_features, layer.eps, layer.momentum, layer.affine, layer.track_running_stats, process_set)
    )
    found.weight, found.bias = layer.weight, layer.bias
    found.running_mean, found.running_var = layer.running_mean, layer.running_var
    found.num_batches_tracked = layer.num_batches_tracked
    found.train(layer.training)
    return found


class _Statistics:
    """Statistics of all ranks' samples: float64, shape (C,), bit-identical on all ranks, on the samples' device."""

    def __init__(self, members: Members, rows: NDArray[np.float64], device: torch.device) -> None:
        """Combine `rows`, one per rank: n, then m of each channel, then s of each channel."""
        channels = rows.shape[1] // 2
        counts, means, squares = rows[:, :1], rows[:, 1 : channels + 1], rows[:, channels + 1 :]
        self.count = int(counts.sum())
        mean = (counts * means).sum(0) / max(1, self.count)
        summed = squares.sum(0) + (counts * (means - mean) ** 2).sum(0)
        found = torch.from_numpy(np.stack([mean, summed, summed / max(1, self.count)]))
        self.mean, self.squares, self.variance = found if device.type == "cpu" else to_device(members, found, device)

    @classmethod
    def of_all_ranks(cls, members: Members, group: Group, values: Tensor) -> "_Statistics":
        """Return the statistics of all ranks' `values`, of shape (N, C, ...).

        Raises:
            ArgumentError: a channel has only one value on all ranks together. Every rank raises it.
        """
        with declining_on_line(members, group):
            own = _row_of(values)
        with internal_errors("SyncBatchNorm"):
            rows = _gathered(members, group, own)
            found = cls(members, np.asarray(rows), values.device)
        if found.count == 1:
            raise ArgumentError(
                "SyncBatchNorm: Expected more than 1 value per channel when training, of all ranks together; got input "
                f"of shape {tuple(values.shape)} here"
            )
        return found


def _gathered(members: Members, group: Group, own: Tensor) -> NDArray[np.float64]:
    """Return all ranks' rows of statistics."""
    label = "SyncBatchNorm forward"
    if own.is_cpu:
        return np.asarray(group.all_gather(own.numpy()[None], label=label))
    _, rows = on_line(members, group, own, lambda array: group.all_gather_async(array[None], label=label))
    return np.asarray(rows)


def _row_of(values: Tensor) -> Tensor:
    """Return this rank's row of statistics: n, then m of each channel, then s of each channel."""
    channels = values.shape[1]
    count = values.numel() // max(1, channels)
    if not count or not channels:
        return torch.zeros(1 + 2 * channels, dtype=torch.float64, device=values.device)
    wide, dims = values.to(_worked_in(values)), _samples(values)
    # Deviations from a rounded mean are corrected afterwards, because torch.var_mean takes ten times as long.
    estimate = wide.mean(dims)
    deviations = wide - _by_channel(estimate, values)
    left = deviations.sum(dims).double() / count
    squares = deviations.square_().sum(dims).double() - count * left**2
    counted = torch.full((1,), float(count), dtype=torch.float64, device=values.device)
    return torch.cat([counted, estimate.double() + left, squares.clamp_(min=0.0)])


class _Normalise(torch.autograd.Function):
    """(x - m) / sqrt(s / n + eps) w + b, in which m and s depend on all ranks' x."""

    @staticmethod
    def forward(  # noqa: PLR0913, PLR0917 -- torch wants each tensor as an argument
        ctx: Any,
        input: Tensor,  # noqa: A002 -- torch's name
        weight: Tensor | None,
        bias: Tensor | None,
        statistics: _Statistics,
        eps: float,
        members: Members,
        group: Group,
    ) -> Tensor:
        ctx.save_for_backward(input, weight)
        ctx.statistics, ctx.eps, ctx.members, ctx.group = statistics, eps, members, group
        if not input.numel():
            return torch.empty_like(input)
        wide = _worked_in(input)
        mean, variance = statistics.mean.to(wide), statistics.variance.to(wide)
        scale, shift = (None if each is None else each.to(wide) for each in (weight, bias))
        return nn.functional.batch_norm(input, mean, variance, scale, shift, eps=eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the input, the weight and the bias.

        With dy the gradient of the output, x' the normalised input and <> the mean over all ranks' samples:

            input: (dy - <dy> - x' <dy x'>) w / sqrt(s / n + eps)
            weight: the sum of dy x' over this rank's samples
            bias: the sum of dy over this rank's samples
        """
        values, weight = ctx.saved_tensors
        statistics: _Statistics = ctx.statistics
        wide = _worked_in(values)
        gradient = gradients[0].to(wide)
        deviations = values.to(wide) - _by_channel(statistics.mean, values).to(wide)
        inverse = (statistics.variance + ctx.eps).rsqrt_()
        dims = _samples(values)
        of_bias = gradient.sum(dims).double()
        of_weight = (gradient * deviations).sum(dims).double().mul_(inverse)
        of_input = None
        if ctx.needs_input_grad[0]:
            sums = torch.stack([of_bias, of_weight])
            with internal_errors("SyncBatchNorm"):
                sums = _summed(ctx.members, ctx.group, sums)
            means = sums.div_(max(1, statistics.count))
            scale = inverse if weight is None else inverse * weight.double()
            slope, shift, factor = (
                _by_channel(each, values).to(wide) for each in (-scale * inverse * means[1], -scale * means[0], scale)
            )
            of_input = deviations.mul_(slope).add_(shift).addcmul_(gradient, factor).to(values.dtype)
        found = [None if weight is None else each.to(weight.dtype) for each in (of_weight, of_bias)]
        return of_input, *found, None, None, None, None


def _summed(members: Members, group: Group, sums: Tensor) -> Tensor:
    """Return the sum of all ranks' `sums`."""
    label = "SyncBatchNorm backward"
    if sums.is_cpu:
        group.all_reduce(sums.numpy(), label=label)
        return sums
    host, _ = on_line(members, group, sums, lambda array: group.all_reduce_async(array, label=label))
    return to_device(members, host, sums.device)


def _worked_in(values: Tensor) -> torch.dtype:
    return torch.float32 if values.dtype in _HALF else values.dtype


def _by_channel(found: Tensor, values: Tensor) -> Tensor:
    """Return `found`, of shape (C,), as a view that broadcasts with `values` of shape (N, C, ...)."""
    return found.view(-1, *[1] * (values.dim() - 2))


def _samples(values: Tensor) -> list[int]:
    """Return all dimensions except the channels."""
    return [dim for dim in range(values.dim()) if dim != 1]
