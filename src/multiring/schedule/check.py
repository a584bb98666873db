"""The proof of a Schedule: every axis pattern once, event by event, and a rule for composing axes.

An all-reduce by a single pattern is proven as it stands on one axis. On several, one after the other, each phase
works on memory of its own, which no other phase writes, and adds up disjoint sets of ranks. For the rest:

The rule. On a grid the collective is right, free of deadlock and of overwritten readers, if its phases are
reduce-scatters along the axes in turn and all-gathers back (broadcasts: back), and along every axis, taken as a
one-axis schedule by itself,

1. the reduce-scatter in place leaves coordinate i the complete part i, which nobody still reads;
2. the all-gather takes part i of coordinate i to everyone;
3. where both run, the two in a row are an all-reduce; and the schedule's own collective is right.

Why that is enough. *Result:* contributions along axis j are disjoint sets of ranks, and each phase maps them as on a
line alone. *Deadlock:* messages of a phase stay within its lines, every rank goes through the phases in the
same order, so the order of dependencies is that of phases, and within a phase that of a line, which is acyclic.
*Matching:* two ranks share at most one axis, and 3. has that axis' phases in a row. *Overwriting:* later phases touch
own parts only until the same axis gathers; own parts are undisturbed by 1.; other parts are safe by 3., whose
chains of messages all exist here too. Memory that a reduce-scatter moves between INPUT, SCRATCH and OUTPUT
only renames: each place sees a part of the writes and reads it would see in place. A coded gather also writes what
it offers, which nobody may be reading then: all later axes are coded too (`Frame`), and what is coded is read out of
a copy. *Replicas:* an axis' gather makes of equal parts equal ranges, by 3., so from axis k back to 1 ranks that
differ in gathered axes only hold the same versions.

tests/pure compares the rule with `check_moves`, which proves all moves of all ranks, on every small grid.
"""

from collections.abc import Mapping
from functools import lru_cache

from multiring.errors import ScheduleError
from multiring.schedule.expand import expand
from multiring.schedule.form import prove_spans
from multiring.schedule.frame import Frame
from multiring.schedule.kinds import Accumulation, Collective, Wire
from multiring.schedule.layout import layout_of
from multiring.schedule.model import Schedule
from multiring.schedule.moves import NOWHERE, Moves
from multiring.schedule.pattern import Effect, Pattern, Phase
from multiring.schedule.promise import promise_of, scattered_promise
from multiring.schedule.prove import prove


def check(schedule: Schedule) -> None:
    """Raise ScheduleError unless `schedule` does what its collective promises, whatever the timing.

    Cost: a line's moves for each distinct pattern and size, and one rank's moves; not all ranks' moves.
    """
    _check_phases(schedule)
    patterns: dict[int, tuple[Pattern, ...]] = {}
    for phase in schedule.phases:
        patterns[phase.axis] = (*patterns.get(phase.axis, ()), phase.pattern)
    once_per_axis = schedule.accumulation is not Accumulation.SAME
    for axis, size in enumerate(schedule.grid):
        wire = schedule.wires[axis]
        _prove_axis(schedule.collective, patterns[axis], size, wire=wire, once_per_axis=once_per_axis)
    prove_spans(layout_of(schedule.frame), schedule.moves_of(schedule.order[0]), schedule.order[0])


def check_moves(schedule: Schedule, programs: Mapping[int, Moves]) -> None:
    """Raise ScheduleError unless `programs` (rank: its moves) do what the schedule's collective promises.

    Only the frame and the accumulation of `schedule` count: this proves moves, wherever they come from.
    Cost: linear in the moves of all ranks; for small schedules and for tests.
    """
    prove(promise_of(schedule.frame, _roundings(schedule)), programs)


def _roundings(schedule: Schedule) -> int:
    axes = sum(size > 1 for size in schedule.grid)
    return {Accumulation.SAME: schedule.ranks, Accumulation.WIDE: axes, Accumulation.ONCE: 1}[schedule.accumulation]


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
    if schedule.accumulation is Accumulation.ONCE and sum(size > 1 for size in schedule.grid) > 1:
        raise ScheduleError(f"{schedule}: a sum over several axes is not accumulated once: use one axis")


@lru_cache(maxsize=256)
def _prove_axis(
    collective: Collective, patterns: tuple[Pattern, ...], size: int, *, wire: Wire, once_per_axis: bool
) -> None:
    """Prove what the rule asks of an axis of `size` ranks; `patterns` are its phases, in order."""
    roundings = 1 if once_per_axis else size
    order, wires = tuple(range(size)), (wire,) if wire else ()
    for pattern in patterns:
        _check_programs(pattern, size)
        if pattern.effect is Effect.REDUCE_SCATTER:
            in_place = Frame(collective=Collective.ALL_REDUCE, grid=(size,), order=order, wires=wires)
            prove(scattered_promise(size, wire), _line(in_place, (pattern,)))
        elif pattern.effect is Effect.ALL_GATHER:
            gather = Frame(collective=Collective.ALL_GATHER, grid=(size,), order=order)
            prove(promise_of(gather, 0), _line(gather, (pattern,)))
    frame = Frame(collective=collective, grid=(size,), order=order, wires=wires)
    prove(promise_of(frame, roundings), _line(frame, patterns))


def _check_programs(pattern: Pattern, size: int) -> None:
    """Raise ScheduleError unless the programs speak of single parts, as `Pattern` says; `expand` relies on it."""
    parts = 1 if pattern.effect in {Effect.BROADCAST, Effect.ALL_REDUCE} else size
    for at in range(size):
        for index, move in enumerate(pattern.program(size, at).rows()):
            named = {part for part in (move.src, move.dst) if part != NOWHERE}
            if len(named) != 1 or not 0 <= min(named) < parts or move.span != 1 or move.channel != 0:
                raise ScheduleError(f"{pattern.name}, coordinate {at} of {size}, move {index}: {move}: want one part")
            if not all(0 <= peer < size for peer in move.peers):
                raise ScheduleError(f"{pattern.name}, coordinate {at} of {size}, move {index}: {move}: no such peer")


def _line(frame: Frame, patterns: tuple[Pattern, ...]) -> dict[int, Moves]:
    phases = [Phase(0, pattern) for pattern in patterns]
    return {rank: expand(frame, phases, rank) for rank in range(frame.ranks)}
