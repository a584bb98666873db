"""ElasticSampler: deals the unprocessed rest of an epoch anew after a reset."""

from collections.abc import Sized

from torch.utils.data import Sampler

from multiring._frontend.lifecycle import rank, size
from multiring._runtime.job.job import is_rank
from multiring.data import ElasticOrder


class ElasticSampler(ElasticOrder, Sampler[int]):
    """This rank's share of the epoch's samples that have not been processed.

    Pass the sampler to a TorchState, call `record_batch` after each batch, and `set_epoch` at the end of each epoch.
    After a reset the ranks continue with the samples that the last commit had not recorded, each of them once. If their
    number is no multiple of the number of ranks, a few samples are taken twice at the end of the epoch.

    Args:
        dataset: a data set of constant length.
        shuffle: whether to shuffle the samples, differently in each epoch.
        seed: seed of the shuffling; the same on all ranks.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:  # noqa: FBT001, FBT002 -- Horovod's signature
        super().__init__(dataset, shuffle, seed, _place)

    def _follow(self) -> None:
        if is_rank():
            super()._follow()


def _place() -> tuple[int, int]:
    return rank(), size()
