"""Evaluation over all ranks: integers, summed, in which every sample is counted exactly once."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from examples.training.recipe import Recipe
from torch import Tensor, nn

import multiring.torch as mt
from multiring.data import Loader
from multiring.data.dataset import Samples
from multiring.torch.step.after_step import MovingAverage

# A sample's loss is summed as a whole number of these parts of one, so that the sum does not depend on its order.
LOSS_PARTS = 2**20
LARGEST_LOSS = 2.0**40 / LOSS_PARTS


@dataclass(frozen=True, slots=True)
class Counted:
    """What an evaluation found.

    loss: the mean over all samples; not a number where any sample's loss is not finite.
    counts: the sum over all samples of what the task counts, int64.
    """

    loss: float
    counts: Tensor


def counted(  # noqa: PLR0913 -- what is counted of what, by whom
    model: nn.Module,
    samples: Samples,
    measure: Callable[[nn.Module, dict[str, Any]], tuple[Tensor, Tensor]],
    *,
    batch: int,
    place: tuple[int, int],
    recipe: Recipe | None = None,
    workers: int = 1,
) -> Counted:
    """Return what `measure` finds over all samples, on every rank; the same numbers whatever the number of ranks is.

    Args:
        model: as it is on all ranks.
        samples: in an order, of which each rank takes its part.
        measure: returns each sample's loss, (n,), and int64 counts of one shape, of the model and a batch.
        batch: samples that all ranks look at together.
        place: this rank, and how many there are.
        recipe: whose average of the weights, and arithmetic, is used.
        workers: threads that read and decode.
    """
    rank, ranks = place
    loader = Loader(samples, batch, rank=rank, ranks=ranks, workers=workers)
    average = recipe.average if recipe is not None else None
    total = torch.zeros(0, dtype=torch.int64)
    was_training = model.training
    model.eval()
    with torch.no_grad(), average.applied() if average is not None else nullcontext():
        for each in loader:
            with recipe.precision.autocast() if recipe is not None else nullcontext():
                found = _with_losses(*measure(model, each))
            # A rank whose part is empty was given another's sample, for its shape.
            found = found * bool(loader.share.samples)
            total = found if not total.numel() else total + found
    loader.close()
    model.train(was_training)
    if ranks > 1:
        total = mt.allreduce(total, op=mt.Sum, name="evaluation")
    samples_counted, unfit, parts = total[:3].tolist()
    loss = math.nan if unfit or not samples_counted else parts / LOSS_PARTS / samples_counted
    return Counted(loss, total[3:])


def _with_losses(losses: Tensor, counts: Tensor) -> Tensor:
    """Return [samples, losses that are not finite or too large, sum of the other losses in parts], then `counts`."""
    losses = losses.double()
    fit = losses.isfinite() & (losses.abs() <= LARGEST_LOSS)
    parts = (losses[fit] * LOSS_PARTS).round().to(torch.int64).sum()
    return torch.cat([torch.stack([torch.tensor(len(losses)), (~fit).sum(), parts]), counts])


def combine_statistics(model: nn.Module, ranks: int, average: MovingAverage | None = None) -> None:
    """Give every rank's batch norms the statistics of all ranks' samples: the mean of means, and the whole variance.

    Those of the average of the weights, where there is one, too. Exact where every rank has seen as many samples; a
    rank's mean moves with its own. Every rank calls it.
    """
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
    own = torch.cat(means)
    squares = torch.cat(variances) + own**2
    both = mt.allreduce(torch.stack([own, squares]), op=mt.Average, name="statistics")
    sizes = [len(each) for each in means]
    for target, found in zip(means, torch.split(both[0], sizes), strict=True):
        target.copy_(found)
    for target, found in zip(variances, torch.split((both[1] - both[0] ** 2).clamp_(min=0), sizes), strict=True):
        target.copy_(found)
