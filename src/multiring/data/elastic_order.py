"""The samples of an epoch, dealt to the ranks, and dealt anew where their number changed or they lost something.

What is done of an epoch is a piece of its order from the beginning, `processed_num` samples long, and single samples
beyond it, `processed_indices`. A reset deals the rest: rank r of p gets samples r, r + p, r + 2p, ... of it, so that
the first batches of all ranks together are a piece from the beginning again. Where the rest is no multiple of p, its
first samples are dealt a second time: all ranks have equally many, and none waits in vain for another.
"""

import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import Any

from multiring.data.orders import digest_of_order
from multiring.errors import ArgumentError


class ElasticOrder:
    """A rank's share of the samples of `dataset` that are not processed yet."""

    def __init__(self, dataset: Sized, shuffle: bool, seed: int, place: Callable[[], tuple[int, int]]) -> None:  # noqa: FBT001
        """Deal epoch 0.

        Args:
            dataset: of constant length, which is how many samples an epoch has.
            shuffle: whether each epoch has an order of its own, the same on all ranks.
            seed: of the orders; the same on all ranks.
            place: gives this rank and how many there are, asked at each reset.
        """
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0
        self.processed_indices: set[int] = set()
        self.records_indices = False  # whether samples are recorded one by one, each rank's own
        self._place = place
        self.reset()

    def reset(self) -> None:
        """Deal what is not processed yet to the ranks there are now."""
        self.rank, self.num_replicas = self._place()
        order = self._order()
        while self.processed_num < len(order) and order[self.processed_num] in self.processed_indices:
            self.processed_num += 1
        self.processed_indices.difference_update(order[: self.processed_num])
        # Where in the order the samples are that are left; without single ones done, just the rest of it.
        self._positions: range | list[int] = range(self.processed_num, len(order))
        if self.processed_indices:
            self._positions = [i for i in self._positions if order[i] not in self.processed_indices]
        self.remaining_indices = [order[i] for i in self._positions]
        self._counted = 0  # of those, from the beginning
        self.num_samples = math.ceil(len(self.remaining_indices) / self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas
        self.indices = self._dealt()

    def _order(self) -> list[int]:
        order = list(range(len(self.dataset)))
        if self.shuffle:
            # Horovod's order, so that its checkpoints go on where they were.
            random.Random(self.seed + self.epoch).shuffle(order)  # noqa: S311 -- no secret
        return order

    def _dealt(self) -> list[int]:
        rest = self.remaining_indices
        return [rest[i % len(rest)] for i in range(self.rank, self.total_size, self.num_replicas)]

    def set_epoch(self, epoch: int) -> None:
        """Begin `epoch`, of which nothing is processed. To be called at the end of the epoch before."""
        self.epoch = epoch
        self.processed_num = 0
        self.processed_indices = set()
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:  # noqa: ARG002 -- Horovod's signature
        """Note that every rank has processed its next `batch_size` samples."""
        self._counted = min(self._counted + batch_size * self.num_replicas, len(self._positions))
        if self._counted:
            self.processed_num = self._positions[self._counted - 1] + 1

    def record_indices(self, indices: Iterable[int]) -> None:
        """Note that this rank has processed these samples.

        For ranks that do not all take the same number of batches of the same size. All of them record in this way,
        also a batch of nothing; what they recorded is put together when the state is saved.

        Raises:
            ArgumentError: there is no such sample.
        """
        found = {int(index) for index in indices}
        count = len(self.dataset)
        for index in found:
            if not 0 <= index < count:
                raise ArgumentError(f"sample {index} of a dataset of {count}: want 0 to {count - 1}")
        self.records_indices = True
        self.processed_indices |= found

    def get_indices(self, batch_idx: int, batch_size: int) -> list[int]:
        """Return the samples of this rank's batch `batch_idx` since the last reset."""
        return self.indices[batch_idx * batch_size : (batch_idx + 1) * batch_size]

    def state_dict(self) -> dict[str, Any]:
        """Return what is done: "epoch", "processed_num" and, where they are recorded, "processed_indices".

        "order" is a digest of what decides where samples stand: how many there are, whether they are shuffled, and the
        seed.
        """
        state: dict[str, Any] = {"epoch": self.epoch, "processed_num": self.processed_num, "order": self._digest()}
        if self.records_indices:
            state["processed_indices"] = sorted(self.processed_indices)
        return state

    def _digest(self) -> str:
        return digest_of_order("elastic", len(self.dataset), bool(self.shuffle), repr(self.seed))

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` says is done, with the ranks there are now.

        Horovod's states do not say of which order they are; theirs is taken to be this one.

        Raises:
            ArgumentError: it says nothing of an epoch, or is of another order: of more or fewer samples, of another
                seed, or shuffled where this one is not.
        """
        epoch, done = state_dict.get("epoch"), state_dict.get("processed_num", 0)
        if epoch is None or done < 0:
            raise ArgumentError(f"state of a sampler {dict(state_dict)}: want its epoch, and processed_num >= 0")
        if state_dict.get("order", self._digest()) != self._digest():
            raise ArgumentError(
                f"state of the order {state_dict['order']} of a sampler, but this one, of {len(self.dataset)} samples, "
                f"shuffle={self.shuffle} and seed={self.seed}, is {self._digest()}: want the one it was taken of"
            )
        self.epoch = epoch
        self.processed_num = min(done, len(self.dataset))
        self.processed_indices = set(state_dict.get("processed_indices", ()))
        self.records_indices = self.records_indices or "processed_indices" in state_dict
        self.reset()

    def _follow(self) -> None:
        """Deal anew what is not processed, where this is another rank, or of another number of them, by now."""
        if self._place() != (self.rank, self.num_replicas):
            self.reset()

    def __iter__(self) -> Iterator[int]:
        self._follow()
        return iter(self.indices)

    def __len__(self) -> int:
        self._follow()
        return self.num_samples
