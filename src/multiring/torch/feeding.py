"""Use data sets of `multiring.data` with torch: a loader of tensors, and an IterableDataset for torch's DataLoader."""

import math
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from multiring._arguments import require_whole
from multiring._frontend.job_place import job_place
from multiring._frontend.sample_counts import count_in_job
from multiring._runtime.job.job import when_changed
from multiring.data.dataset import Samples
from multiring.data.feeding.batches import batch_of
from multiring.data.feeding.loader import Batch, Loader, require_samples
from multiring.data.permutation import MOST
from multiring.data.progress import Progress, steps
from multiring.errors import ArgumentError, DataError
from multiring.torch.collectives.allreduce import allreduce
from multiring.torch.distributing.measuring import MeasuredShares
from multiring.torch.distributing.options import AgreedOptions
from multiring.torch.distributing.rules import Rules
from multiring.torch.distributing.weighing import Weighing, scaled
from multiring.torch.gradients.distributed import Distributed


def tensors_of(batch: Batch) -> Batch:
    """Return `batch` with its arrays as tensors that share their memory.

    Raises:
        DataError: torch has no type for an array.
    """
    return {name: _tensor(name, value) if isinstance(value, np.ndarray) else value for name, value in batch.items()}


def _tensor(name: str, array: Any) -> Tensor:
    try:
        return torch.from_numpy(array)
    except TypeError:
        raise DataError(
            f"{name} is an array of {array.dtype}, for which torch has no type: use a transform that converts it to "
            "numbers, or omits it"
        ) from None


class DataLoader(Loader):
    """Load batches of this rank's samples as tensors.

    The arguments are those of `multiring.data.Loader`. Without `rank` and `ranks`, the loader uses the job's values at
    the start of each iteration. `distribute` accepts this loader in place of torch's DataLoader. `batch` is then the
    number of samples of all ranks together, and the gradients are weighted by each rank's part of the batch.
    """

    def __init__(self, samples: Samples, batch: int, **options: Any) -> None:
        super().__init__(samples, batch, **options)
        if not options.keys() & {"rank", "ranks"}:
            self.follow(job_place)
        self._weighing: Weighing | None = None
        self._rules: Rules | None = None
        self._options: AgreedOptions | None = None
        self._shares: MeasuredShares | None = None
        if not options.keys() & {"rank", "ranks"}:
            self.count_by(count_in_job)

    @property
    def batching(self) -> str:
        """The arguments that decide how many batches the ranks exchange; they have to be equal on all ranks."""
        return f"batch={self.batch}, drop_last={self._drop_last}, skip_bad={self._leaving_out is not None}"

    def attend(self, rules: Rules, weighing: Weighing, optimizer: Distributed) -> None:
        """Use this loader in `distribute`: load for this job's ranks, and weight the gradients."""
        self._rules, self._weighing, self._options = rules, weighing, AgreedOptions(optimizer)
        self.follow(job_place)
        self.count_by(count_in_job)
        self._shares = MeasuredShares() if rules.shares == "speed" else None
        self.divide_by(None if self._shares is None else self._shares.divide_in)

    def __iter__(self) -> Iterator[Batch]:
        """Yield the remaining batches of the epoch; after the end of an epoch, yield those of the next epoch."""
        if self._weighing is not None:
            self._weighing.begin()
        if self._options is not None:
            self._options.require_equal()
        for batch in super().__iter__():
            if self._weighing is not None:
                self._weighing.set(self.share)
                # The last batch ends the last group of backwards, even if the group is incomplete.
                self._weighing.reduce_early(early=self.may_be_last)
            if self._shares is None:
                yield tensors_of(batch)
            else:
                self._shares.begin()
                yield tensors_of(batch)
                self._shares.end(self.share.samples)
        if self._weighing is not None:
            self._weighing.set(None)
            self._weighing.reduce_early(early=False)

    def global_loss(self, loss: Tensor) -> Tensor:
        """Return the global batch's loss, given the loss of this rank's part; every rank must call this.

        Raises:
            ArgumentError: this loader was not passed to `distribute`.
        """
        if self._weighing is None or self._rules is None:
            raise ArgumentError(
                "global_loss: this loader was not made by `distribute`; use the loader that `distribute` returned"
            )
        own = scaled(self._weighing.factor_of(self.share), loss.detach())
        return allreduce(own, op=self._rules.op, name="distribute.loss")


class IterableDataset(torch.utils.data.IterableDataset[Batch]):
    """This rank's batches of an epoch, for torch's DataLoader.

    The DataLoader must have `batch_size=None`, and may have any number of workers. The order of the batches does not
    depend on the number of workers, because torch takes batches from the workers in turn. Workers prefetch batches that
    the training has not used yet. `state_after` therefore takes the number of used batches, and returns the state of
    the training after them.

    Args:
        samples: a Dataset or a Mixture.
        batch: the number of samples of a step, on all ranks together.
        rank: this rank; by default, the job's value at the start of each iteration.
        ranks: the number of ranks; by default, the job's value at the start of each iteration.

    Raises:
        ArgumentError: `samples` is no data set, `batch` or `ranks` is not a whole number from 1 on, or `rank` is not
            below `ranks`.
    """

    def __init__(self, samples: Samples, batch: int, *, rank: int | None = None, ranks: int | None = None) -> None:
        super().__init__()
        require_samples(samples)
        self._samples, self._batch = samples, require_whole("batch", batch, 1, MOST)
        self._ranks = None if ranks is None else require_whole("ranks", ranks, 1, MOST)
        most = None if self._ranks is None else self._ranks - 1
        self._rank = None if rank is None else require_whole("rank", rank, 0, most)
        self._progress = Progress.beginning(samples)
        # Workers may live longer than an epoch and a job. Shared memory tells them the rank, the number of ranks, the
        # epoch and the first sample.
        self._told = _shared(torch.zeros(4, dtype=torch.int64, device="cpu"))
        self._tell()
        _tell_workers_of(self)

    def _place(self) -> tuple[int, int]:
        here, ranks = job_place()
        return (here if self._rank is None else self._rank, ranks if self._ranks is None else self._ranks)

    def _tell(self) -> None:
        """Write the next iteration's rank, number of ranks, epoch and first sample to the workers' shared memory."""
        self._told.copy_(torch.tensor([*self._place(), self._progress.epoch, self._progress.samples], device="cpu"))

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        if not self._told.is_shared():  # type: ignore[no-untyped-call] # torch's own; a copy may have its own workers
            self._told = _shared(self._told.clone())
            _tell_workers_of(self)

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches of this worker."""
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
        """Return the number of remaining batches of the epoch."""
        return math.ceil((self._samples.order.length - self._progress.samples) / self._batch)

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration start at the beginning of `epoch`.

        Raises:
            ArgumentError: `epoch` is not a whole number from 0 on.
        """
        self._progress = replace(Progress.beginning(self._samples), epoch=require_whole("epoch", epoch, 0, MOST))
        self._tell()

    def state_after(self, batches: int) -> dict[str, Any]:
        """Return the state of a training that has used `batches` batches since the epoch began or was resumed.

        Raises:
            ArgumentError: `batches` is not a whole number from 0 on.
        """
        batches = require_whole("batches", batches)
        done = min(self._samples.order.length, self._progress.samples + batches * self._batch)
        return replace(self._progress, samples=done).state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from `state`.

        Raises:
            ArgumentError: `state` is of another data set or seed, or is not a state.
        """
        self._progress = self._progress.resumed(state, self._samples.order.length)
        self._tell()


def _shared(tensor: Tensor) -> Tensor:
    """Return `tensor`, moved to memory that is shared with other processes."""
    return tensor.share_memory_()  # type: ignore[no-untyped-call, no-any-return] # torch's own


_datasets: "weakref.WeakSet[IterableDataset]" = weakref.WeakSet()


def _tell_workers_of(dataset: IterableDataset) -> None:
    """From now on, inform the data set's workers about each job that this process joins."""
    _listens()
    _datasets.add(dataset)


@cache
def _listens() -> None:
    when_changed(_tell_all)


def _tell_all() -> None:
    for each in list(_datasets):
        each._tell()  # noqa: SLF001 -- a class of this module
