"""The order of samples: rank 0's sampler draws it, and each rank gets its part.

All ranks therefore train in the order of one sampler, as a single process does. The order does not depend on how the
other ranks seed their samplers. Two ranks never get the same sample of a batch, unless the sampler drew it twice.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any, cast

from torch.utils.data import Sampler

from multiring._frontend.lifecycle import rank, size
from multiring._frontend.object_collectives import broadcast_object
from multiring.data import merge_batches, shard_batch
from multiring.data.shares import positions_by_counts
from multiring.torch.distributing.draws import raise_failure_of_rank_0, require_indices, words_of_failure
from multiring.torch.distributing.passes import PassRecord

# Rank 0 draws and broadcasts this many batches at once. That keeps messages few, and still allows a sampler that never
# ends.
AHEAD = 32

Batches = Iterable[Sequence[Any]]
DivideIn = Callable[[], Callable[[int], Sequence[int]]]  # see `MeasuredShares.divide_in`


class OwnBatches(Sampler[list[Any]]):
    """The batches that this rank's loader draws, with their sample counts."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches
        # The sample counts of batches that the newest pass has drawn but not handed out yet: this rank's, that of all
        # ranks, and that of the rank with the fewest.
        self.counts: deque[tuple[int, int, int]] = deque()

    def __iter__(self) -> Iterator[list[Any]]:
        # Reset the counts here and not in the generator, because the caller takes a reference to this pass's counts at
        # once.
        self.counts = deque()
        return self._drawn(self.counts)

    def _drawn(self, counts: deque[tuple[int, int, int]]) -> Iterator[list[Any]]:
        for batch in self._batches:
            found = list(batch)
            counts.append((len(found), len(found), len(found)))
            yield found

    def __len__(self) -> int:
        return len(cast("Sequence[Any]", self._batches))


class SharedBatches(OwnBatches):
    """This rank's parts of the batches that rank 0's loader draws."""

    def __init__(
        self,
        batches: Batches,
        together: int,
        *,
        drops_last: bool,
        divide_in: DivideIn | None,
        record: PassRecord | None,
    ) -> None:
        """Store the sampler; the first iteration draws from it.

        Args:
            batches: batches of indices. Only rank 0 draws from them; the other ranks use their length.
            together: number of these batches that form one global batch.
            drops_last: whether to drop an incomplete global batch at the end.
            divide_in: returns the function that divides the batches of a pass; None divides them equally.
            record: keeps the place in the passes; None if it is not kept.
        """
        super().__init__(batches)
        self._together = together
        self._drops_last = drops_last
        self._divide_in = divide_in
        self._record = record
        if record is not None:
            record.together, record.drops_last = together, drops_last

    def _drawn(self, counts: deque[tuple[int, int, int]]) -> Iterator[list[Any]]:
        here, ranks = rank(), size()
        divide = None if self._divide_in is None else self._divide_in()
        for batch in self._of_all_ranks():
            if divide is None:
                part, least = shard_batch(batch, here, ranks), len(batch) // ranks
            else:
                dealt = divide(len(batch))
                part, least = [batch[place] for place in positions_by_counts(dealt, here)], min(dealt)
            counts.append((len(part), len(batch), least))
            # A rank without a part computes on the first sample, which then has weight 0.
            yield part or list(batch[:1])

    def _of_all_ranks(self) -> Iterator[Sequence[Any]]:
        if self._record is not None:
            return merge_batches(self._record.rest(self._batches), self._together, drops_last=self._drops_last)
        return _told_by_rank_0(partial(merge_batches, self._batches, self._together, drops_last=self._drops_last))

    def __len__(self) -> int:
        whole, more = divmod(super().__len__(), self._together)
        return whole + (more > 0 and not self._drops_last)


def _told_by_rank_0(draw: Any) -> Iterator[list[Any]]:
    """Yield the batches that `draw` yields on rank 0, on every rank."""
    source = draw() if rank() == 0 else iter(())
    while True:
        batches, failure, is_last = _block(source)
        block = batches, words_of_failure(failure), is_last
        batches, told, is_last = broadcast_object(block, 0, name="distribute.batches")
        yield from batches
        raise_failure_of_rank_0(failure, told, "the next batch")
        if is_last:
            return


def _block(source: Iterator[list[Any]]) -> tuple[list[list[Any]], Exception | None, bool]:
    """Return the next batches, the exception to raise after them, and whether the source is exhausted."""
    batches: list[list[Any]] = []
    try:
        for batch in islice(source, AHEAD):
            require_indices(batch)
            batches.append(batch)
    except Exception as error:  # noqa: BLE001 -- raised once all ranks have used the batches before it
        return batches, error, True
    return batches, None, len(batches) < AHEAD
