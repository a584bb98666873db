"""Distribute an epoch's samples over the ranks, and redistribute the rest when the number of ranks changes.

The processed samples of an epoch are the first `processed_num` samples of its order, and the single samples in
`processed_indices`. A reset distributes the remaining samples: rank r of p gets the remaining samples r, r + p,
r + 2p, ... The first batches of all ranks together are therefore the first remaining samples of the order. If the
number of remaining samples is not a multiple of p, the first remaining samples are given out twice. Every rank then has
the same number of samples, so that no rank waits for a collective that another rank never starts.
"""

import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import Any

from multiring._arguments import require_flag, require_function, require_seed, require_whole, shown, whole
from multiring.data.orders import digest_of_order
from multiring.errors import ArgumentError


class ElasticOrder:
    """One rank's share of the samples that are not processed yet."""

    def __init__(self, dataset: Sized, shuffle: bool, seed: int, place: Callable[[], tuple[int, int]]) -> None:  # noqa: FBT001
        """Distribute epoch 0.

        Args:
            dataset: its length is the number of samples of an epoch, and must not change.
            shuffle: whether each epoch is shuffled differently, in the same way on all ranks.
            seed: the seed of the shuffling; it must be the same on all ranks.
            place: returns this rank and the number of ranks; called at each reset.

        Raises:
            ArgumentError: `dataset` has no length, `seed` is not a whole number, or `shuffle` not a truth value.
        """
        if not isinstance(dataset, Sized):
            raise ArgumentError(f"dataset={shown(dataset)}: want a data set with a length")
        self.dataset = dataset
        self.shuffle = require_flag("shuffle", shuffle)
        self.seed = require_seed("seed", seed)
        self.epoch = 0
        self.processed_num = 0
        self.processed_indices: set[int] = set()
        self.records_indices = False  # whether this rank records single samples (`record_indices`)
        self._place = require_function("place", place)
        self.reset()

    def reset(self) -> None:
        """Distribute the unprocessed samples over the current ranks."""
        self.rank, self.num_replicas = self._place()
        order = self._order()
        while self.processed_num < len(order) and order[self.processed_num] in self.processed_indices:
            self.processed_num += 1
        self.processed_indices.difference_update(order[: self.processed_num])
        # Find the positions of the remaining samples. If no single samples are processed, these are the rest of the
        # order.
        self._positions: range | list[int] = range(self.processed_num, len(order))
        if self.processed_indices:
            self._positions = [i for i in self._positions if order[i] not in self.processed_indices]
        self.remaining_indices = [order[i] for i in self._positions]
        self._counted = 0  # how many of these positions are processed
        self.num_samples = math.ceil(len(self.remaining_indices) / self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas
        self.indices = self._dealt()

    def _order(self) -> list[int]:
        order = list(range(len(self.dataset)))
        if self.shuffle:
            # This is Horovod's order, so that a training can resume from Horovod's checkpoints.
            random.Random(self.seed + self.epoch).shuffle(order)  # noqa: S311 -- no secret
        return order

    def _dealt(self) -> list[int]:
        rest = self.remaining_indices
        return [rest[i % len(rest)] for i in range(self.rank, self.total_size, self.num_replicas)]

    def set_epoch(self, epoch: int) -> None:
        """Begin `epoch` with no processed samples.

        Call this at the end of the previous epoch.

        Raises:
            ArgumentError: `epoch` is not a whole number from 0 on.
        """
        self.epoch = require_whole("epoch", epoch)
        self.processed_num = 0
        self.processed_indices = set()
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:  # noqa: ARG002 -- Horovod's signature
        """Record that every rank has processed its next `batch_size` samples.

        Raises:
            ArgumentError: `batch_size` is not a whole number from 0 on.
        """
        batch_size = require_whole("batch_size", batch_size)
        self._counted = min(self._counted + batch_size * self.num_replicas, len(self._positions))
        if self._counted:
            self.processed_num = self._positions[self._counted - 1] + 1

    def record_indices(self, indices: Iterable[int]) -> None:
        """Record that this rank has processed these samples.

        Use this if the ranks' batches differ in number or size. All ranks must then call it for each batch, also for an
        empty one. The ranks' records are merged when the state is saved.

        Raises:
            ArgumentError: an index is not in the data set.
        """
        count = len(self.dataset)
        found = set()
        for index in indices:
            number = whole(index)
            if number is None or not 0 <= number < count:
                raise ArgumentError(f"sample {shown(index)} of a dataset of {count}: want 0 to {count - 1}")
            found.add(number)
        self.records_indices = True
        self.processed_indices |= found

    def get_indices(self, batch_idx: int, batch_size: int) -> list[int]:
        """Return the samples of this rank's batch `batch_idx` since the last reset."""
        return self.indices[batch_idx * batch_size : (batch_idx + 1) * batch_size]

    def state_dict(self) -> dict[str, Any]:
        """Return the progress for a checkpoint.

        It has "epoch", "processed_num", "order" and, if `record_indices` was called, "processed_indices".
        "order" is a digest of the values that determine the order: the number of samples, `shuffle` and the seed.
        """
        state: dict[str, Any] = {"epoch": self.epoch, "processed_num": self.processed_num, "order": self._digest()}
        if self.records_indices:
            state["processed_indices"] = sorted(self.processed_indices)
        return state

    def _digest(self) -> str:
        return digest_of_order("elastic", len(self.dataset), bool(self.shuffle), repr(self.seed))

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume from a saved progress, with the current ranks.

        A state of Horovod has no digest of its order. Its order is assumed to be the order of this object.

        Raises:
            ArgumentError: the state has no epoch, or is of another order: the number of samples, the seed or `shuffle`
                differs.
        """
        epoch, done = state_dict.get("epoch"), state_dict.get("processed_num", 0)
        if epoch is None or done < 0:
            raise ArgumentError(f"state of a sampler {dict(state_dict)}: want its epoch, and processed_num >= 0")
        if state_dict.get("order", self._digest()) != self._digest():
            raise ArgumentError(
                f"the state has the order {state_dict['order']}, but this sampler of {len(self.dataset)} samples with "
                f"shuffle={self.shuffle} and seed={self.seed} has {self._digest()}: want the dataset, shuffle and seed "
                "with which the state was saved"
            )
        self.epoch = epoch
        self.processed_num = min(done, len(self.dataset))
        self.processed_indices = set(state_dict.get("processed_indices", ()))
        self.records_indices = self.records_indices or "processed_indices" in state_dict
        self.reset()

    def _follow(self) -> None:
        """Redistribute the unprocessed samples if this rank or the number of ranks has changed."""
        if self._place() != (self.rank, self.num_replicas):
            self.reset()

    def __iter__(self) -> Iterator[int]:
        self._follow()
        return iter(self.indices)

    def __len__(self) -> int:
        self._follow()
        return self.num_samples
