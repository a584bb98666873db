"""Data sets of `multiring.data` for torch: a loader of tensors, and an IterableDataset for torch's own DataLoader."""

import math
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from multiring.data.dataset import Samples
from multiring.data.feeding.batches import batch_of
from multiring.data.feeding.loader import Batch, Loader
from multiring.data.progress import Progress, steps
from multiring.errors import ArgumentError, DataError
from multiring.frontend.job_place import job_place
from multiring.frontend.sample_counts import count_in_job
from multiring.runtime.job.job import when_changed
from multiring.torch.collectives.allreduce import allreduce
from multiring.torch.distributing.rules import Rules
from multiring.torch.distributing.weighing import Weighing, scaled
from multiring.torch.gradients.distributed import Distributed


def tensors_of(batch: Batch) -> Batch:
    """Return a batch with its arrays as tensors of the same memory.

    Raises:
        DataError: torch has no such type.
    """
    return {name: _tensor(name, value) if isinstance(value, np.ndarray) else value for name, value in batch.items()}


def _tensor(name: str, array: Any) -> Tensor:
    try:
        return torch.from_numpy(array)
    except TypeError:
        raise DataError(
            f"{name} is an array of {array.dtype}, for which torch has no type: want a transform that gives numbers, "
            "or leaves it out"
        ) from None


class DataLoader(Loader):
    """Batches of tensors of this rank's samples; see `multiring.data.Loader`, whose arguments it takes.

    `rank` and `ranks` are the job's where they are not given, as they are when an iteration begins. `distribute` takes
    it in place of torch's DataLoader: `batch` is then that of all ranks together, and gradients are weighted by each
    rank's part of it.
    """

    def __init__(self, samples: Samples, batch: int, **options: Any) -> None:
        super().__init__(samples, batch, **options)
        if not options.keys() & {"rank", "ranks"}:
            self.follow(job_place)
        self._weighing: Weighing | None = None
        self._rules: Rules | None = None
        self._optimizer: Distributed | None = None
        if not options.keys() & {"rank", "ranks"}:
            self.count_by(count_in_job)

    def attend(self, rules: Rules, weighing: Weighing, optimizer: Distributed) -> None:
        """Be the loader of a distributed training: of this job's ranks, with gradients weighted."""
        self._rules, self._weighing, self._optimizer = rules, weighing, optimizer
        self.follow(job_place)
        self.count_by(count_in_job)

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches that are left of the epoch; at its end, those of the next one."""
        for batch in super().__iter__():
            if self._weighing is not None and self._optimizer is not None:
                self._weighing.set(self.share)
                # With the last batch ends the last group of backwards, be it complete or not.
                self._weighing.reduce_early(early=self.may_be_last)
            yield tensors_of(batch)
        if self._weighing is not None and self._optimizer is not None:
            self._weighing.set(None)
            self._weighing.reduce_early(early=False)

    def global_loss(self, loss: Tensor) -> Tensor:
        """Return the loss of the newest global batch, given that of this rank's part; every rank has to call it.

        Raises:
            ArgumentError: `distribute` has not been given this loader.
        """
        if self._weighing is None or self._rules is None:
            raise ArgumentError("global_loss of a loader that `distribute` was not given; want what it returned")
        own = scaled(self._weighing.factor_of(self.share), loss.detach())
        return allreduce(own, op=self._rules.op, name="distribute.loss")


class IterableDataset(torch.utils.data.IterableDataset[Batch]):
    """An epoch's batches of this rank, for torch's DataLoader with batch_size=None and any number of its workers.

    The batches come in the same order whatever that number is, as torch takes its workers in turn. What they are ahead
    is not done: `state_after` says how far a training is that has used so many batches.

    Args:
        samples: a Dataset or a Mixture.
        batch: samples of a step, on all ranks together.
        rank: this one; by default the job's, as it is when an iteration begins.
        ranks: how many there are; by default the job's, as they are when an iteration begins.
    """

    def __init__(self, samples: Samples, batch: int, *, rank: int | None = None, ranks: int | None = None) -> None:
        super().__init__()
        self._samples, self._batch = samples, batch
        self._rank, self._ranks = rank, ranks
        self._progress = Progress.beginning(samples)
        # What workers have to know, which may stay longer than an epoch and a job: the place, and where to begin.
        self._told = _shared(torch.zeros(4, dtype=torch.int64))
        self._tell()
        _tell_workers_of(self)

    def _place(self) -> tuple[int, int]:
        here, ranks = job_place()
        return (here if self._rank is None else self._rank, ranks if self._ranks is None else self._ranks)

    def _tell(self) -> None:
        """Tell the workers, with whom this is shared, where the next iteration begins, and for which rank."""
        self._told.copy_(torch.tensor([*self._place(), self._progress.epoch, self._progress.samples]))

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        if not self._told.is_shared():  # type: ignore[no-untyped-call] # torch's own; a copy, which may have workers of its own
            self._told = _shared(self._told.clone())
            _tell_workers_of(self)

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches that this worker makes."""
        told = torch.utils.data.get_worker_info()
        number, workers = (told.id, told.num_workers) if told is not None else (0, 1)
        if told is None:
            self._tell()
        here, ranks, epoch, begin = self._told.tolist()
        made = steps(self._samples.order, self._batch, epoch=epoch, begin=begin, rank=here, ranks=ranks)
        for turn, step in enumerate(made):
            if turn % workers == number:
                yield tensors_of(batch_of(self._samples, step))

    def __len__(self) -> int:
        """Return how many batches are left of the epoch."""
        return math.ceil((self._samples.order.length - self._progress.samples) / self._batch)

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch."""
        self._progress = replace(Progress.beginning(self._samples), epoch=epoch)
        self._tell()

    def state_after(self, batches: int) -> dict[str, Any]:
        """Return the state of a training that has used so many batches since this epoch began, or was resumed."""
        done = min(self._samples.order.length, self._progress.samples + batches * self._batch)
        return replace(self._progress, samples=done).state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken.

        Raises:
            ArgumentError: it is of another data set or seed, or none.
        """
        self._progress = self._progress.resumed(state, self._samples.order.length)
        self._tell()


def _shared(tensor: Tensor) -> Tensor:
    """Return `tensor`, moved to memory that other processes share."""
    return tensor.share_memory_()  # type: ignore[no-untyped-call, no-any-return] # torch's own


_datasets: "weakref.WeakSet[IterableDataset]" = weakref.WeakSet()


def _tell_workers_of(dataset: IterableDataset) -> None:
    """Tell the data set's workers of each job that this process joins from now on."""
    _listens()
    _datasets.add(dataset)


@cache
def _listens() -> None:
    when_changed(_tell_all)


def _tell_all() -> None:
    for each in list(_datasets):
        each._tell()  # noqa: SLF001 -- of this module
