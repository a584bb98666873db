"""A custom call of a program: what it does, and among which ranks."""

from collections.abc import Sequence
from dataclasses import dataclass

from multiring.frontend.process_sets import Members, ProcessSet, global_process_set
from multiring.frontend.reduce_ops import LINEAR, Sum, chosen_op, name_of
from multiring.frontend.requests.text import ALL_GATHER, REDUCE_SCATTER, call_text
from multiring.runtime import Group

Ranks = ProcessSet | Group  # whose ranks a call is among

sets: dict[int, ProcessSet | Members] = {
    0: global_process_set
}  # those that programs were traced with, by their numbers


@dataclass(frozen=True, slots=True)
class Call:
    """What one custom call does: the same on all ranks."""

    collective: int
    op: str
    root: int  # in the whole job; of a reduction the number by which its first steps are known
    wire: str | None
    process_set: int
    name: str  # "": ranks match it by the order in which they come to it
    is_inline: bool = False  # it runs on the thread that calls it
    shows: bool = False  # its arrays to the process, and has no results

    @property
    def text(self) -> str:
        """The call as the program has it."""
        op = chosen_op(self.op) if self.op else Sum
        return call_text(self.collective, op, self.process_set, self.name, root=self.root, wire=self.wire)


SMOOTH = tuple(name_of(op) for op in LINEAR)  # those that have gradients


def result_shape(collective: int, shape: Sequence[int], ranks: int) -> tuple[int, ...]:
    """Return the shape that an array of `shape` becomes."""
    if collective == ALL_GATHER:
        return shape[0] * ranks, *shape[1:]
    if collective == REDUCE_SCATTER:
        return shape[0] // ranks, *shape[1:]
    return tuple(shape)
