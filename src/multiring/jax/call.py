"""The description of a custom call in a program: the collective and its ranks."""

from collections.abc import Sequence
from dataclasses import dataclass

from multiring._frontend.process_sets import Members, ProcessSet, global_process_set
from multiring._frontend.reduce_ops import LINEAR, Sum, chosen_op, name_of
from multiring._frontend.requests.text import (
    ALL_GATHER,
    ALL_TO_ALL,
    JAX,
    REDUCE_SCATTER,
    CallSignature,
    call_text,
    name_of_call,
)
from multiring._runtime import Group

Ranks = ProcessSet | Group  # the ranks that take part in a call

sets: dict[int, ProcessSet | Members] = {
    0: global_process_set
}  # number -> process set or members, for all sets that traced programs use


@dataclass(frozen=True, slots=True)
class CustomCall:
    """The description of one custom call, the same on all ranks."""

    collective: int
    op: str
    root: int  # the root's rank in the whole job; a reduction has a number here, for the comparison of first steps
    wire: str | None
    process_set: int
    name: str  # ranks match calls by this name, or by the order of calls if the name is ""
    is_inline: bool = False  # the call runs on the calling thread
    shows: bool = False  # the call passes its arrays to the process, and has no results
    paths: tuple[str, ...] = ()  # the paths of its arrays in their tree; see CallSignature

    @property
    def text(self) -> str:
        """The call as text, in the form that programs contain."""
        op = chosen_op(self.op) if self.op else Sum
        name, signature = self.name, None
        if not self.shows:
            # The shapes of the results are fixed when a program is traced, so all ranks must have equally many rows.
            name = name_of_call(JAX, self.name)
            signature = CallSignature(self.paths, needs_equal_rows=self.collective in {ALL_GATHER, ALL_TO_ALL})
        return call_text(
            self.collective, op, self.process_set, name, root=self.root, wire=self.wire, signature=signature
        )


SMOOTH = tuple(name_of(op) for op in LINEAR)  # the operations with gradients


def result_shape(collective: int, shape: Sequence[int], ranks: int) -> tuple[int, ...]:
    """Return the shape of the collective's result for an array of `shape`."""
    if collective == ALL_GATHER:
        return shape[0] * ranks, *shape[1:]
    if collective == REDUCE_SCATTER:
        return shape[0] // ranks, *shape[1:]
    return tuple(shape)
