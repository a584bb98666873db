"""Prove a Schedule: prove every axis pattern once, event by event, and apply a rule for composing axes.

A line is the set of ranks that differ only in their coordinate along one axis. If an all-reduce consists of one
all-reduce pattern, the proof covers that pattern on its axis. If it consists of several such patterns in a row, each
phase works on memory that no other phase writes, and adds up disjoint sets of ranks. All other schedules need the
arguments below.

Some ranks may be outside the grid. Each of them joins one rank of the grid. They are proven separately, as a star of
one grid rank and the ranks that join it. This suffices around the grid's phases, for four reasons. The added sets are
disjoint. The grid rank passes through the phases as if the sum were its own contribution. It sends its final buffer,
which no rank writes any more. The chain of messages that ends in the result proves that a joining rank's buffer was
read before the result is sent.

The rule. A collective on a grid is right, is free of deadlock, and never overwrites memory that is still being read,
under two assumptions. First, its phases are reduce-scatters along the axes in order, then all-gathers in reverse order
(for a broadcast: broadcasts in reverse order). Second, every axis, taken as a one-axis schedule by itself, fulfils
these conditions:

1. the reduce-scatter in place leaves the complete part i at coordinate i, and no rank reads that part any more;
2. the all-gather brings part i of coordinate i to every coordinate;
3. if the axis has both phases, the two phases in a row are an all-reduce; and the schedule's own collective is right.

Why the rule suffices:

*Result:* contributions along axis j are disjoint sets of ranks, and each phase maps them as on a line by itself.
*Deadlock:* the messages of a phase stay within its lines, and every rank goes through the phases in the same order. So
dependencies follow the order of the phases, and within a phase the order of a line, which is acyclic.
*Matching:* two ranks share at most one axis, and condition 3 proves that axis' phases in a row.
*Overwriting:* until the same axis gathers, later phases touch a rank's own parts only. Condition 1 leaves these parts
undisturbed. The other parts are safe by condition 3, whose chains of messages all exist here too. A reduce-scatter that
moves data between INPUT, SCRATCH and OUTPUT only renames memory: each location sees a part of the writes and reads that
it would see in place. A gather on a lossy wire also writes the chunks that it offers, so no rank may read these chunks
at that time. No rank reads them, because all later axes have lossy wires too (`Frame`), and encoded messages are
copies. *Replicas:* by condition 3, the gather of an axis turns equal parts into equal ranges. So, from axis k back to
axis 1, ranks that differ only in gathered axes hold the same versions.

tests/pure compares the rule with `check_moves`, which proves all moves of all ranks, on every small grid.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from multiring._schedule.expand import expand
from multiring._schedule.form import ChunkSpans, text_of
from multiring._schedule.frame import Frame
from multiring._schedule.kinds import Accumulation, Collective, Wire
from multiring._schedule.layout import layout_of
from multiring._schedule.model import Schedule
from multiring._schedule.moves import NOWHERE, Moves
from multiring._schedule.pattern import Effect, Pattern, Phase, parts_of
from multiring._schedule.promise import Promise, promise_of, scattered_promise
from multiring._schedule.prove import prove
from multiring._schedule.turn import Likeness, Turn
from multiring._schedule.turned import prove_turned
from multiring.errors import ScheduleError

# If a line has more messages, one rank's moves prove it, or the line is rejected. A proof of this many messages takes
# about 10 s.
_MOST_MESSAGES = 1 << 18


def check(schedule: Schedule, ranks: Iterable[int] | None = None) -> None:
    """Raise ScheduleError unless `schedule` keeps its collective's promise in every order of events.

    Along an axis the programs of most patterns are rotations of rank 0's program. For these patterns the proof covers
    rank 0's moves (turned.py), and checks that every other program is a rotation of them. For other patterns all moves
    of all ranks are proven one by one. If the line is too long for that, the error names the difference.

    Args:
        schedule: the schedule to prove.
        ranks: the ranks whose programs are compared with rank 0's; None: all. The proof assumes that the programs of
            other ranks are rotations too. If each rank of a job passes itself, some rank compares every program.

    Cost: one program for each compared rank and pattern, and for each axis the proof of one rank's moves.
    """
    _check_phases(schedule)
    patterns: dict[int, tuple[Pattern, ...]] = {}
    for phase in schedule.phases:
        patterns[phase.axis] = (*patterns.get(phase.axis, ()), phase.pattern)
    once_per_axis = schedule.accumulation is not Accumulation.SAME
    frame = schedule.frame
    for count in sorted({len(frame.joined_to(partner)) for _, partner in frame.joined}):
        _prove_joining(count)
    compared = None if ranks is None else [frame.coordinates_of(frame.joins(rank)) for rank in ranks]
    for axis, size in enumerate(schedule.grid):
        line = Line(
            size=size,
            wire=schedule.wires[axis],
            compared=None if compared is None else tuple(sorted({each[axis] for each in compared})),
        )
        _prove_axis(schedule.collective, patterns[axis], line, once_per_axis=once_per_axis)
    spans = ChunkSpans(layout_of(frame))
    for rank in (schedule.order[0], *(each for pair in frame.joined[:1] for each in pair)):
        moves = schedule.moves_of(rank)
        spans.prove(moves, rank)
        _prove_channels(moves, rank, frame.channels)


def check_moves(schedule: Schedule, programs: Mapping[int, Moves]) -> None:
    """Raise ScheduleError unless `programs` (moves by rank) keep the promise of the schedule's collective.

    Only the frame and the accumulation of `schedule` are used: `programs` may come from any source.
    Cost: linear in the moves of all ranks. Use it for small schedules and for tests.
    """
    prove(promise_of(schedule.frame, _roundings(schedule)), programs)


def _prove_channels(moves: Moves, rank: int, channels: int) -> None:
    """Raise ScheduleError unless `moves` use all channels: the executor counts a program's channels."""
    used = sorted(set(moves.channel.tolist()))
    if used not in ([], list(range(channels))):
        raise ScheduleError(f"rank {rank}: moves on channels {used}; want moves on all {channels} channels")


def _roundings(schedule: Schedule) -> int:
    axes = _sums_of(schedule)
    return {Accumulation.SAME: schedule.ranks, Accumulation.WIDE: axes, Accumulation.ONCE: 1}[schedule.accumulation]


def _sums_of(schedule: Schedule) -> int:
    """Return the number of consecutive sums: one along each axis, and one if ranks join the grid."""
    return sum(size > 1 for size in schedule.grid) + bool(schedule.frame.joined)


def _check_phases(schedule: Schedule) -> None:
    axes = list(range(len(schedule.grid)))
    forth = [(axis, Effect.REDUCE_SCATTER) for axis in axes]
    back = [(axis, Effect.ALL_GATHER) for axis in reversed(axes)]
    want = {
        Collective.ALL_REDUCE: forth + back,
        Collective.REDUCE_SCATTER: forth,
        Collective.ALL_GATHER: back,
        Collective.BROADCAST: [(axis, Effect.BROADCAST) for axis in reversed(axes)],
        Collective.ALL_TO_ALL: [(0, Effect.ALL_TO_ALL)],
    }[schedule.collective]
    got = [(phase.axis, phase.pattern.effect) for phase in schedule.phases]
    if schedule.collective is Collective.ALL_REDUCE and got == [(axis, Effect.ALL_REDUCE) for axis in axes]:
        want = got
    if got != want or (schedule.collective is Collective.ALL_TO_ALL and len(axes) > 1):
        phases = ", ".join(f"{effect.value} along axis {axis + 1}" for axis, effect in got)
        raise ScheduleError(f"{schedule}: phases {phases or 'none'} do not compose to {schedule.collective.value}")
    if schedule.accumulation is Accumulation.ONCE and _sums_of(schedule) > 1:
        raise ScheduleError(
            f"{schedule}: a sum over several axes, or with joining ranks, is not accumulated once: use one axis"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """A line along an axis, and the coordinates whose programs are compared (None: all)."""

    size: int
    wire: Wire
    compared: tuple[int, ...] | None

    def coordinates(self) -> Sequence[int]:
        """Return the coordinates to compare."""
        return range(self.size) if self.compared is None else self.compared


@lru_cache(maxsize=256)
def _prove_joining(count: int) -> None:
    """Prove the all-reduce of one rank and `count` ranks that join it."""
    frame = Frame(
        collective=Collective.ALL_REDUCE,
        grid=(1,),
        order=(0,),
        joined=tuple((rank, 0) for rank in range(1, count + 1)),
    )
    prove(promise_of(frame, 1), {rank: expand(frame, (), rank) for rank in range(frame.ranks)})


@lru_cache(maxsize=256)
def _prove_axis(collective: Collective, patterns: tuple[Pattern, ...], line: Line, *, once_per_axis: bool) -> None:
    """Prove the rule's conditions on a line; `patterns` are its phases, in order."""
    size, wire = line.size, line.wire
    roundings = 1 if once_per_axis else size
    order, wires = tuple(range(size)), (wire,) if wire else ()
    alike = {pattern: _Alike.of(pattern, line) for pattern in dict.fromkeys(patterns)}
    for pattern in patterns:
        if pattern.effect is Effect.REDUCE_SCATTER:
            in_place = Frame(collective=Collective.ALL_REDUCE, grid=(size,), order=order, wires=wires)
            _prove_line(scattered_promise(size, wire), in_place, [alike[pattern]])
        elif pattern.effect is Effect.ALL_GATHER:
            gather = Frame(collective=Collective.ALL_GATHER, grid=(size,), order=order)
            _prove_line(promise_of(gather, 0), gather, [alike[pattern]])
    frame = Frame(collective=collective, grid=(size,), order=order, wires=wires)
    _prove_line(promise_of(frame, roundings), frame, [alike[pattern] for pattern in patterns])


@dataclass(frozen=True, eq=False, slots=True)
class _Alike:
    """A pattern on a line, and whether its programs are rotations of coordinate 0's program."""

    pattern: Pattern
    is_fixed: NDArray[np.bool_]  # from `Likeness`
    difference: str  # the first difference; empty if there is none

    @classmethod
    def of(cls, pattern: Pattern, line: Line) -> "_Alike":
        """Compare the programs of the coordinates of `line`, and check that each move has one part.

        Raises:
            ScheduleError: a move names more than one part; `Pattern` forbids it, and `expand` relies on that.
        """
        size, parts = line.size, parts_of(pattern.effect, line.size)
        has_root = pattern.effect is Effect.BROADCAST
        first = pattern.program(size, 0)
        _check_program(pattern, line.size, 0, first)
        likeness, difference = Likeness(first, Turn.of_parts(size, parts)), "it has a root" if has_root else ""
        # A pattern with a root is always proven completely, whichever ranks the caller compares.
        for at in range(size) if has_root else line.coordinates():
            program = pattern.program(size, at)
            _check_program(pattern, size, at, program)
            row = None if difference else likeness.differs(program, at)
            if row is not None:
                difference = _difference(pattern.name, (first, program), (size, at, row))
        return cls(pattern, likeness.is_fixed, difference)


def _difference(name: str, programs: tuple[Moves, Moves], where: tuple[int, int, int]) -> str:
    size, at, row = where
    words = [text_of(next(moves.take(np.array([row])).rows())) if row < len(moves) else "no move" for moves in programs]
    return f"{name}, coordinate {at} of {size}, move {row}: {words[1]}; coordinate 0 has: {words[0]}"


def _prove_line(promise: Promise, frame: Frame, patterns: Sequence[_Alike]) -> None:
    """Prove `patterns`, one after the other, on a line by itself."""
    phases = [Phase(0, each.pattern) for each in patterns]
    turn = _turn_of(promise, [each.pattern.effect for each in patterns])
    difference = next((each.difference for each in patterns if each.difference), "")
    if turn is not None and not difference:
        moves = expand(frame, phases, 0)
        is_fixed = np.concatenate([each.is_fixed for each in patterns])
        before = np.zeros(max(0, len(moves) - len(is_fixed)), np.bool_)  # the local copies at the beginning
        try:
            prove_turned(promise, moves, np.concatenate([before, is_fixed]), turn)
        except ScheduleError:
            # The proof of all moves makes the decision, because its error names ranks.
            if not _is_short(phases, frame.ranks):
                raise
        else:
            return
    if not _is_short(phases, frame.ranks):
        raise ScheduleError(
            f"{difference or 'phases that do not turn alike'}: a line of {frame.ranks} ranks is too long to be proven"
            " message by message; make all programs rotations of rank 0's, or use a grid of several axes"
        )
    prove(promise, {rank: expand(frame, phases, rank) for rank in range(frame.ranks)})


def _turn_of(promise: Promise, effects: Sequence[Effect]) -> Turn | None:
    """Return the rotation of a line's chunks under patterns with these effects; None if the chunks do not rotate."""
    if promise.ranks == 1:
        return None
    if all(effect is Effect.ALL_REDUCE for effect in effects):
        return Turn.of_ranks(promise.ranks, promise.layout) if promise.stays else None
    if any(effect in {Effect.ALL_REDUCE, Effect.BROADCAST} for effect in effects):
        return None
    return Turn.of_chunks(promise.ranks, promise.layout) if promise.turns else None


def _is_short(phases: Sequence[Phase], size: int) -> bool:
    """Return whether a line has so few messages that each message can be proven by itself."""
    programs = (phase.pattern.program(size, at) for phase in phases for at in range(size))
    counts = accumulate(len(program.peers) for program in programs)
    return all(count <= _MOST_MESSAGES for count in counts)


def _check_program(pattern: Pattern, size: int, at: int, program: Moves) -> None:
    parts = parts_of(pattern.effect, size)
    named = np.where(program.src == NOWHERE, program.dst, program.src)
    both = (program.src != NOWHERE) & (program.dst != NOWHERE)
    wrong = (named < 0) | (named >= parts) | (both & (program.src != program.dst))
    wrong |= (program.span != 1) | (program.channel != 0)
    strange = (program.peers < 0) | (program.peers >= size)
    for bad, want in ((wrong, "want one part"), (_any_peer(program, strange), "no such peer")):
        if bad.any():
            index = int(bad.argmax())
            move = next(program.take(np.array([index])).rows())
            raise ScheduleError(f"{pattern.name}, coordinate {at} of {size}, move {index}: {move}: {want}")


def _any_peer(program: Moves, peers: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return, for each move, whether one of its peers is marked in `peers`: shape (moves,)."""
    found = np.zeros(len(program), np.bool_)
    found[np.repeat(np.arange(len(program)), np.diff(program.peer_start))[peers]] = True
    return found
