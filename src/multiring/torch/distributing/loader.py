"""DistributedLoader: gives each rank its part of every global batch."""

from collections import deque
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from multiring._frontend.lifecycle import rank, size
from multiring._runtime.job.job import is_rank
from multiring._steps.step_counters import with_timed_waits
from multiring.data import Share, seed_for
from multiring.errors import StateError
from multiring.torch.collectives.allreduce import allreduce
from multiring.torch.collectives.broadcast import broadcast_
from multiring.torch.distributing.counting import CountedBatch, Counting, divided, require_distinct, together
from multiring.torch.distributing.fingerprints import UNKNOWN
from multiring.torch.distributing.measuring import MeasuredShares
from multiring.torch.distributing.options import AgreedOptions
from multiring.torch.distributing.order import OwnBatches, SharedBatches
from multiring.torch.distributing.passes import PassRecord, require_passes
from multiring.torch.distributing.rules import Rules
from multiring.torch.distributing.weighing import Weighing, scaled
from multiring.torch.gradients.distributed import Distributed

Each = TypeVar("Each")
Batch_co = TypeVar("Batch_co", covariant=True)

_INITIALIZED = "_DataLoader__initialized"


class DistributedLoader(DataLoader[Batch_co]):
    """A data loader, made by `distribute`, of this rank's part of each global batch.

    When the loader yields a batch, it sets the weight of gradients to this rank's part of that batch. Run the batch's
    backward before taking the next batch. All ranks have to iterate over the same number of batches.
    """

    def __init__(self, loader: DataLoader[Batch_co], rules: Rules, weighing: Weighing, optimizer: Distributed) -> None:
        """Adopt the settings of `loader`, which `distribute` has checked."""
        self._rules = rules
        self._weighing = weighing
        self._options = AgreedOptions(optimizer)
        self._share: Share | None = None
        self._shares = MeasuredShares() if rules.shares == "speed" else None
        self._record: PassRecord | None = None
        self._turn: object = None  # the iteration that counts for the place
        self._epochs = _with_epochs(loader)
        self._last_epochs: dict[int, int] = {}
        self._build(loader)

    def _build(self, loader: DataLoader[Batch_co]) -> None:
        """Set this loader up for the current rank and number of ranks, with the settings of `loader`."""
        rules = self._rules
        self._source, self._place = loader, (rank(), size())
        self._order: OwnBatches | None = None
        count = rules.batches_together(size())
        # If the program has its own batch sampler, the number of samples in a batch is unknown.
        self._batch_size = loader.batch_size and loader.batch_size * (size() if rules.batch == "per_rank" else 1)
        is_iterable = isinstance(loader.dataset, IterableDataset)
        options: dict[str, Any] = {"collate_fn": loader.collate_fn}
        if is_iterable:
            place = (0, 1) if rules.sharded else (rank(), size())
            options["collate_fn"] = Counting(loader.collate_fn, *place, looks=rules.check and not rules.sharded)
            options |= {"batch_size": (loader.batch_size or 1) * count, "drop_last": loader.drop_last}
        else:
            batches: Any = loader.batch_sampler
            drops_last = bool(getattr(batches, "drop_last", False))
            divide_in = None if self._shares is None else self._shares.divide_in
            self._order = (
                OwnBatches(batches)
                if rules.sharded
                else SharedBatches(batches, count, drops_last=drops_last, divide_in=divide_in, record=self._record)
            )
            options["batch_sampler"] = self._order
        # If every rank reads a whole iterable data set, all ranks must draw the same random numbers.
        self._draws_alike = is_iterable and not rules.sharded
        vars(self)[_INITIALIZED] = False  # otherwise torch refuses to change the batch size
        super().__init__(
            loader.dataset,
            num_workers=loader.num_workers,
            pin_memory=loader.pin_memory,
            timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
            generator=loader.generator if rank() == 0 else torch.Generator(),
            prefetch_factor=loader.prefetch_factor,
            persistent_workers=loader.persistent_workers,
            pin_memory_device=loader.pin_memory_device,
            **options,
        )
        # Programs read these settings. torch itself uses only the batch sampler if there is one.
        vars(self).update({name: getattr(loader, name) for name in ("sampler", "drop_last")})
        if not is_iterable:
            vars(self)["batch_size"] = loader.batch_size

    @property
    def global_batch_size(self) -> int | None:
        """The number of samples of a step on all ranks; None if a batch sampler decides."""
        return self._batch_size

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the sampler, the batch sampler and the data set.

        Call it on every rank. Objects without a `set_epoch` method are skipped.
        """
        for each in self._epochs:
            each.set_epoch(epoch)

    @property
    def epoch(self) -> int:
        """The number of finished passes; see `keep_place`.

        Raises:
            StateError: the place is not kept.
        """
        return self._kept().number

    def keep_place(self) -> None:
        """Keep the place in the passes from now on, so that a training can go on in the middle of one.

        `TorchState` calls it for a loader among its values. Rank 0 then draws each pass as a whole, and all ranks keep
        its numbers of samples. An iteration yields the batches that are left of the pass.

        Raises:
            ArgumentError: the place cannot be kept: the ranks have samples of their own, the data set is iterable, or
                the sampler has no length.
        """
        require_passes(self._source, sharded=self._rules.sharded)
        if self._record is None:
            self._record = PassRecord(self._source)
            self._build(self._source)

    def state_dict(self) -> dict[str, Any]:
        """Return the place after the newest batch, the same on all ranks and for any number of ranks.

        Raises:
            StateError: the place is not kept; see `keep_place`.
        """
        return self._kept().state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state` in the next iteration; every rank must call it.

        Raises:
            ArgumentError: `state` is no result of `state_dict`, or of another data set or loader.
            StateError: the place is not kept; see `keep_place`.
        """
        self._kept().load_state_dict(state)
        self._turn = None

    def _kept(self) -> PassRecord:
        if self._record is None:
            raise StateError("the place in the passes of this loader is not kept: call keep_place() before the first")
        return self._record

    def global_loss(self, loss: Tensor) -> Tensor:
        """Return the loss of the newest global batch. Call it on every rank.

        Args:
            loss: the loss of this rank's part, of any shape. Other means over the samples work too, or other sums with
                `reduction="sum"`.

        Raises:
            StateError: the loader has not yielded a batch yet.
        """
        if self._share is None:
            raise StateError("no batch of the loader has been handed out yet; call global_loss after taking a batch")
        own = scaled(self._weighing.factor_of(self._share), loss.detach())
        return allreduce(own, op=self._rules.op, name="distribute.loss")

    def _follow_job(self) -> None:
        """Rebuild the loader if this process has left the job and joined it again with another rank or size.

        Raises:
            StateError: the number of ranks has changed, and the learning rate was scaled for the former number.
        """
        if not is_rank() or self._place == (rank(), size()):
            return
        scale = self._rules.learning_rate
        if scale in {"linear", "sqrt"} and self._place[1] != size():
            raise StateError(
                f"the loader of distribute(learning_rate={scale!r}) in a job of {size()} ranks: the learning rate was "
                f"scaled for {self._place[1]}. Call distribute anew, with a learning rate that was not scaled"
            )
        self._iterator = None  # persistent workers still deal for the former rank
        self._build(self._source)

    def __len__(self) -> int:
        """Return the number of batches in a pass."""
        self._follow_job()
        return super().__len__()

    def __iter__(self) -> Any:
        """Start a pass over the data set.

        If the sampler resumes an interrupted pass, only the rest of that pass follows.
        """
        self._follow_job()
        self._advance_epochs()
        self._draw_other_seeds()
        batches = with_timed_waits(super().__iter__())
        # The pass keeps its own counts, because another pass may begin before it ends.
        counted = iter(batches) if self._order is None else _counted(batches, self._order.counts)
        return self._handed_out(counted)

    def _handed_out(self, counted: Iterator[CountedBatch]) -> Iterator[Batch_co]:
        batches = together(counted) if self._rules.sharded else divided(counted, agree=self._order is None)
        checks = self._rules.check and size() > 1
        # The last batch ends the last accumulation group, even if the group is incomplete. Only the loader can detect
        # the last batch.
        told = _with_the_last_told(batches) if self._weighing.accumulates else ((each, False) for each in batches)
        turn = self._turn = object()
        self._weighing.begin()
        self._options.require_equal()
        for (batch, share), is_last in told:
            if self._record is not None and self._turn is not turn:
                raise StateError(
                    "this iteration of the loader is over, because another one has begun, or a state was loaded, while "
                    "a state keeps the loader's place: iterate anew; for a pass within a pass, use another loader"
                )
            if checks:
                require_distinct(batch, share)
                checks = False
            self._share = share
            self._weighing.set(share)
            self._weighing.reduce_early(early=is_last)
            if self._record is not None:
                self._record.hand_out()
            if self._shares is None:
                yield batch
            else:
                self._shares.begin()
                yield batch
                self._shares.end(share.samples)
        self._weighing.set(None)
        self._weighing.reduce_early(early=False)
        if self._record is not None and self._turn is turn:
            self._record.end()

    def _draw_other_seeds(self) -> None:
        """Derive the workers' seed from rank 0's generator state; the seed differs for each rank."""
        if not self.num_workers or size() == 1:
            return
        generator = self.generator
        state = torch.get_rng_state() if generator is None else generator.get_state()
        broadcast_(state, 0, name="distribute.seeds")
        if rank() == 0 or generator is None:
            return
        generator.set_state(state)
        if not self._draws_alike:
            drawn = int(torch.empty((), dtype=torch.int64, device="cpu").random_(generator=generator))
            generator.manual_seed(seed_for(drawn, rank()))

    def _advance_epochs(self) -> None:
        """Advance the epoch of DistributedSamplers, unless the program has set a new epoch."""
        for number, each in enumerate(self._epochs):
            if isinstance(each, DistributedSampler) and each.num_replicas > 1:
                if self._last_epochs.get(number) == each.epoch:
                    each.set_epoch(each.epoch + 1)
                self._last_epochs[number] = each.epoch


def _counted(batches: Any, counts: deque[tuple[int, int, int]]) -> Iterator[CountedBatch]:
    for batch in batches:
        yield CountedBatch(batch, *counts.popleft(), UNKNOWN)


def _with_epochs(loader: DataLoader[Any]) -> list[Any]:
    """Return the parts of the loader that have a `set_epoch` method, each once."""
    batches = loader.batch_sampler
    found = [loader.sampler, batches, getattr(batches, "sampler", None), loader.dataset]
    return list({id(each): each for each in found if hasattr(each, "set_epoch")}.values())


def _with_the_last_told(batches: Iterator[Each]) -> Iterator[tuple[Each, bool]]:
    """Yield each item of `batches` and whether it is the last.

    An exception of `batches` is raised after the items before it have been yielded.
    """
    waiting = list(islice(batches, 1))
    while waiting:
        failure: Exception | None = None
        following: list[Each] = []
        try:
            following = list(islice(batches, 1))
        except Exception as error:  # noqa: BLE001 -- raised after the previous batch has been used
            failure = error
        yield waiting[0], not following and failure is None
        if failure is not None:
            raise failure
        waiting = following
