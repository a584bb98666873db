"""Evaluation over all ranks: integer counts, summed, of which every sample is in one exactly."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from examples.training.recipe import Recipe
from torch import Tensor, nn

import multiring.torch as mt
from multiring.data import Loader
from multiring.data.dataset import Samples
from multiring.torch.large_batch.after_step import MovingAverage


def counted(  # noqa: PLR0913 -- what is counted of what, by whom
    model: nn.Module,
    samples: Samples,
    count: Callable[[nn.Module, dict[str, Any]], Tensor],
    *,
    batch: int,
    place: tuple[int, int],
    recipe: Recipe | None = None,
    workers: int = 1,
) -> Tensor:
    """Return the sum of `count` over all samples, on every rank: int64, and so the same on any number of ranks.

    Args:
        model: as it is on all ranks.
        samples: in an order, of which each rank takes its part.
        count: of the model and a batch, int64 of one shape.
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
                found = count(model, each)
            # A rank whose part is empty was given another's sample, for its shape.
            found = found * bool(loader.share.samples)
            total = found if not total.numel() else total + found
    loader.close()
    model.train(was_training)
    return total if ranks == 1 else mt.allreduce(total, op=mt.Sum, name="evaluation")


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
