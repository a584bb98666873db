"""A rank's part of a batch in micro-batches."""

from collections.abc import Iterator

from torch import nn

import multiring.torch as mt
from multiring.errors import ArgumentError
from multiring.training.task import Batch


def micro_batches(batch: Batch, samples: int, passes: int) -> Iterator[Batch]:
    """Yield a batch in micro-batches of similar size; nothing if the rank has no samples.

    Args:
        batch: the rank's part of a batch.
        samples: its number of samples.
        passes: the number of micro-batches, if there are as many samples.
    """
    count = min(passes, samples)
    for number in range(count):
        chosen = slice(number * samples // count, (number + 1) * samples // count)
        yield {name: value[chosen] for name, value in batch.items()}


def require_equal_passes(model: nn.Module, *, batch: int, samples: int, ranks: int, passes: int) -> None:
    """Raise ArgumentError if a rank would have fewer micro-batches than others, and batch norms wait for every rank.

    Args:
        model: the network.
        batch: samples of a batch, of all ranks.
        samples: samples of an epoch; the last batch can have fewer than `batch`.
        ranks: the number of ranks.
        passes: the micro-batches of the rank with the most samples, in a whole batch.
    """
    if ranks == 1 or not any(isinstance(each, mt.SyncBatchNorm) for each in model.modules()):
        return
    for size in {min(batch, samples), samples % batch} - {0}:
        least, most = (min(passes, part) for part in (size // ranks, -(-size // ranks)))
        if least < most:
            raise ArgumentError(
                f"batch={batch} on {ranks} ranks: a batch of {size} samples gives a rank {most} micro-batches and "
                f"another {least}, and batch norms over all ranks would wait for it without end. Want batches of at "
                f"least {ranks} samples, better a multiple of {ranks}, fewer ranks, or batch norms of each rank's own"
            )
