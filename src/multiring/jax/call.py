"""A custom call of a program, as text: what it does, to which arrays, among which ranks."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from multiring.frontend.process_sets import ProcessSet, global_process_set
from multiring.frontend.reduce_ops import LINEAR, name_of

ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER = "all_reduce", "all_gather", "reduce_scatter"
BROADCAST, ALL_TO_ALL = "broadcast", "all_to_all"

sets: dict[int, ProcessSet] = {0: global_process_set}


@dataclass(frozen=True, slots=True)
class Call:
    """What one custom call does: the same on all ranks, and all that its text says."""

    collective: str
    op: str
    root: int
    wire: str | None
    process_set: int
    name: str  # "": ranks match it by the order in which they come to it
    arrays: tuple[tuple[str, tuple[int, ...]], ...]  # types by NumPy's names, and shapes

    @property
    def text(self) -> str:
        """The call as the program has it."""
        return json.dumps(
            [self.collective, self.op, self.root, self.wire, self.process_set, self.name, self.arrays],
            separators=(",", ":"),
        )


@lru_cache(maxsize=4096)
def call_of(text: str) -> Call:
    """Return the call that `text` means."""
    collective, op, root, wire, process_set, name, arrays = json.loads(text)
    return Call(collective, op, root, wire, process_set, name, tuple((dtype, tuple(shape)) for dtype, shape in arrays))


SMOOTH = tuple(name_of(op) for op in LINEAR)  # those that have gradients


def result_shape(collective: str, shape: Sequence[int], ranks: int) -> tuple[int, ...]:
    """Return the shape that an array of `shape` becomes."""
    if collective == ALL_GATHER:
        return shape[0] * ranks, *shape[1:]
    if collective == REDUCE_SCATTER:
        return shape[0] // ranks, *shape[1:]
    return tuple(shape)
