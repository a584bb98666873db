"""Evaluate over all ranks: every sample is counted exactly once, and the counts are summed as integers."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import multiring.torch as mt
from multiring._arguments import is_of, require_function, require_whole, shown
from multiring.data import Loader, Samples
from multiring.errors import ArgumentError
from multiring.torch.step.after_step import MovingAverage
from multiring.training.devices import placed
from multiring.training.recipe import TrainingRecipe

# A sample's loss is summed as an integer multiple of this fraction, so that the sum does not depend on the order.
LOSS_PARTS = 2**20
LARGEST_LOSS = 2.0**40 / LOSS_PARTS


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """The result of an evaluation.

    loss: the mean over all samples; NaN if any sample's loss is not finite.
    counts: the sum over all samples of the task's counts, int64.
    """

    loss: float
    counts: Tensor


def evaluate(  # noqa: PLR0913 -- all are needed
    model: nn.Module,
    samples: Samples,
    measure: Callable[[nn.Module, dict[str, Any]], tuple[Tensor, Tensor]],
    *,
    batch: int,
    place: tuple[int, int] | None = None,
    recipe: TrainingRecipe | None = None,
    workers: int = 1,
) -> EvaluationResult:
    """Return the result of `measure` over all samples, on every rank; it is the same for any number of ranks.

    Args:
        model: the model; it is the same on all ranks.
        samples: the samples in their order; each rank takes a part of each batch.
        measure: returns each sample's loss, (n,), and int64 counts, (k,), for the model and a batch of n samples.
        batch: the number of samples per batch, of all ranks together.
        place: this rank, and the number of ranks; by default those of the job, or one rank before `init`.
        recipe: its averaged weights and its precision are used.
        workers: threads that read and decode.

    Raises:
        ArgumentError: `measure` is no function, or returned losses of another shape, or counts that are not int64; or
            an argument of the loader is wrong.
    """
    require_function("measure", measure, "a function of the model and a batch")
    if place is not None and (not is_of(place, tuple, list) or len(place) != 2):
        raise ArgumentError(f"place={shown(place)}: want this rank and the number of ranks, or None")
    rank, ranks = place or ((mt.rank(), mt.size()) if mt.is_initialized() else (0, 1))
    loader = Loader(samples, batch, rank=rank, ranks=ranks, workers=workers)
    average = recipe.average if recipe is not None else None
    device = next((each.device for each in model.parameters()), torch.device("cpu"))
    total = torch.zeros(0, dtype=torch.int64)
    was_training = model.training
    model.eval()
    with torch.no_grad(), average.applied() if average is not None else nullcontext():
        for each in loader:
            with recipe.precision.autocast() if recipe is not None else nullcontext():
                losses, counts = measure(model, placed(each, device))
            if counts.dtype != torch.int64 or counts.dim() != 1:
                raise ArgumentError(
                    f"measure returned counts of type {counts.dtype} and shape {tuple(counts.shape)}: want int64 "
                    "numbers, (k,), which add up over samples"
                )
            found = _with_losses(per_sample(losses, each).cpu(), counts.cpu())
            # A rank with an empty part measures another rank's sample, only to get the shape of the counts.
            found = found * bool(loader.share.samples)
            total = found if not total.numel() else total + found
    loader.close()
    model.train(was_training)
    if ranks > 1:
        total = mt.allreduce(total, op=mt.Sum, name="evaluation")
    samples_counted, unfit, parts = total[:3].tolist()
    loss = math.nan if unfit or not samples_counted else parts / LOSS_PARTS / samples_counted
    return EvaluationResult(loss, total[3:])


def per_sample(losses: Tensor, batch: dict[str, Any]) -> Tensor:
    """Return `losses`; raise ArgumentError unless they are one number for each sample of `batch`."""
    samples = len(next(iter(batch.values())))
    if losses.shape != (samples,):
        raise ArgumentError(
            f"the task returned losses of shape {tuple(losses.shape)} for {samples} samples: want one loss for each, "
            f'({samples},). Use reduction="none", and average over the dimensions of a sample only'
        )
    return losses


def _with_losses(losses: Tensor, counts: Tensor) -> Tensor:
    """Return [samples, losses that are not finite or too large, sum of the other losses in fractions], then counts."""
    losses = losses.double()
    fit = losses.isfinite() & (losses.abs() <= LARGEST_LOSS)
    parts = (losses[fit] * LOSS_PARTS).round().to(torch.int64).sum()
    return torch.cat([torch.stack([torch.tensor(len(losses)), (~fit).sum(), parts]), counts])


def combine_batch_norm_statistics(model: nn.Module, ranks: int, average: MovingAverage | None = None) -> None:
    """Set the statistics of every rank's batch norms to those of all ranks' samples.

    The mean becomes the mean of the ranks' means, and the variance includes the spread of these means. The same is done
    for the averaged weights, if there are any. The result is exact if every rank has seen equally many samples; a
    rank's running mean follows its own samples. Every rank calls this function.

    Raises:
        ArgumentError: `ranks` is not a whole number from 1 on.
    """
    ranks = require_whole("ranks", ranks, 1)
    if ranks == 1:
        return
    _combine(model)
    if average is not None:
        with average.applied():
            _combine(model)


@torch.no_grad()
def _combine(model: nn.Module) -> None:
    norms = [each for each in model.modules() if isinstance(each, nn.modules.batchnorm._BatchNorm)]  # noqa: SLF001
    means = [each.running_mean for each in norms if each.running_mean is not None]
    variances = [each.running_var for each in norms if each.running_var is not None]
    if not means:
        return
    # In float32, the squares of means that are large beside their variance would leave nothing of the variance.
    own = torch.cat(means).double()
    squares = torch.cat(variances).double() + own**2
    both = mt.allreduce(torch.stack([own, squares]), op=mt.Average, name="statistics")
    sizes = [len(each) for each in means]
    for target, found in zip(means, torch.split(both[0], sizes), strict=True):
        target.copy_(found)
    for target, found in zip(variances, torch.split((both[1] - both[0] ** 2).clamp_(min=0), sizes), strict=True):
        target.copy_(found)
