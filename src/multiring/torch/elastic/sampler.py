"""ElasticSampler: a sampler that knows what of an epoch is done, and deals the rest anew after a reset."""

from collections.abc import Sized

from torch.utils.data import Sampler

from multiring.data import ElasticOrder
from multiring.frontend.lifecycle import rank, size
from multiring.runtime.job.job import is_rank


class ElasticSampler(ElasticOrder, Sampler[int]):
    """This rank's share of a dataset's samples, less those that were processed in the epoch so far.

    Give it to a TorchState, call `record_batch` after each batch, and `set_epoch` at the end of each epoch. After a
    reset the ranks go on with the samples that were not recorded when the state was committed last, each of them once;
    only where they are no multiple of the number of ranks, a few are taken twice at the end of the epoch.

    Args:
        dataset: of constant length.
        shuffle: whether each epoch has an order of its own.
        seed: of those orders; the same on all ranks.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:  # noqa: FBT001, FBT002 -- Horovod's
        super().__init__(dataset, shuffle, seed, _place)

    def _follow(self) -> None:
        if is_rank():
            super()._follow()


def _place() -> tuple[int, int]:
    return rank(), size()
