"""Actions of one rank for the steps of a random program: start an operation and check its result."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
from tests.support.cases import assert_same, digest_of, even_rows
from tests.support.steps import Array, Dice, Memory, Step, check_coded

import multiring
from multiring._runtime.arrays import numpy_dtype
from multiring.errors import ArgumentError, MismatchError


@dataclass(frozen=True, slots=True)
class Team:
    """A group as all ranks know it. `group` is None on ranks that are not members."""

    number: int
    ranks: tuple[int, ...]  # ranks of the world group
    group: multiring.Group | None
    replicas: dict[int, bytes] = field(default_factory=dict)  # step -> digest of the common result

    def member(self) -> multiring.Group:
        """Return the group; only its member ranks may call this."""
        assert self.group is not None
        return self.group


class Start(Protocol):
    """A function that starts an operation."""

    def __call__(self, *, waits: bool) -> Any: ...


@dataclass(slots=True)
class Act:
    """An action of this rank in a step of a random program.

    `start` returns a handle, or the result with `waits=True`. `check` takes the result.
    """

    step: Step
    team: Team
    start: Start
    check: Callable[[Any], None]
    line: tuple[object, ...] = ()  # acts with equal `line` must be posted in program order
    refusal: type[Exception] | tuple[type[Exception], ...] | None = None


def all_reduce(step: Step, team: Team, own: Dice) -> Act:
    group = team.member()
    axes = tuple(step.dice().permutation(len(step.shape)).tolist())
    memory = Memory(group, step.values(group.rank, step.shape), own, axes)

    def start(*, waits: bool) -> Any:
        begin = group.all_reduce if waits else group.all_reduce_async
        return begin(memory.shown, step.op, wire=step.wire, label=step.label)

    def check(_: Any) -> None:
        operands = [np.transpose(step.values(rank, step.shape), axes).ravel() for rank in range(group.size)]
        if step.wire and len(group.topology.hosts) > 1:
            check_coded(memory.flat, operands, step)
        else:
            step.check(memory.flat, operands, step)
        memory.check_around(step)
        team.replicas[step.number] = digest_of(memory.flat)

    return Act(step, team, start, check)


def repeat(step: Step, team: Team, own: Dice) -> Act:
    """Return an act that repeats a blocking call. The runtime runs repeated calls on a separate fast path."""
    group = team.member()
    turns, values = int(step.dice().integers(2, 6)), step.values(group.rank, step.shape)
    memory = Memory(group, values, own)
    operands = [step.values(rank, step.shape).ravel() for rank in range(group.size)]

    def start(*, waits: bool) -> Any:
        for turn in range(turns):
            memory.array[...] = values
            if turn == turns - 1 and not waits:
                return group.all_reduce_async(memory.array, step.op)
            group.all_reduce(memory.array, step.op)
            step.check(memory.flat, operands, step)
            memory.check_around(step)
        return None

    return Act(step, team, start, lambda _: step.check(memory.flat, operands, step))


def broadcast(step: Step, team: Team, own: Dice) -> Act:
    group = team.member()
    dice = step.dice()
    axes, root = tuple(dice.permutation(len(step.shape)).tolist()), int(dice.integers(group.size))
    memory = Memory(group, step.values(group.rank, step.shape), own, axes)

    def start(*, waits: bool) -> Any:
        begin = group.broadcast if waits else group.broadcast_async
        return begin(memory.shown, root, label=step.label)

    def check(_: Any) -> None:
        assert_same(memory.array, step.values(root, step.shape), step)
        memory.check_around(step)

    return Act(step, team, start, check)


def _out(own: Dice, group: multiring.Group, shape: tuple[int, ...], dtype: str) -> Memory | None:
    if own.random() < 0.5:
        return None
    return Memory(group, np.zeros(shape, numpy_dtype(dtype)), own)


def _rows_act(
    step: Step, team: Team, memory: Memory, out: Memory | None, start: Start, want: Callable[[Any], None]
) -> Act:
    """Return the act of a collective that does not change its input and returns a result."""
    before = memory.flat.tobytes()

    def check(result: Any) -> None:
        want(result if out is None else out.array)
        assert memory.flat.tobytes() == before, f"{step}: the input was changed"
        for each in filter(None, (memory, out)):
            each.check_around(step)

    return Act(step, team, start, check)


def reduce_scatter(step: Step, team: Team, own: Dice) -> Act:
    group = team.member()
    memory = Memory(group, step.values(group.rank, step.shape), own)
    rows = even_rows(step.shape[0], group.size)
    begin = sum(rows[: group.rank])
    out = _out(own, group, (rows[group.rank], *step.shape[1:]), step.dtype)

    def start(*, waits: bool) -> Any:
        run = group.reduce_scatter if waits else group.reduce_scatter_async
        return run(memory.shown, None if out is None else out.shown, step.op, label=step.label)

    def want(result: Array) -> None:
        own = slice(begin, begin + rows[group.rank])
        step.check(result, [step.values(rank, step.shape)[own] for rank in range(group.size)], step)

    return _rows_act(step, team, memory, out, start, want)


def all_gather(step: Step, team: Team, own: Dice) -> Act:
    group = team.member()
    dice = step.dice()
    even, with_rows, in_place = dice.random() < 0.5, bool(dice.random() < 0.3), own.random() < 0.3
    most = step.shape[0] // group.size
    rows = [most] * group.size if even else [int(dice.integers(most + 1)) for _ in range(group.size)]
    shapes = [(each, *step.shape[1:]) for each in rows]
    memory = Memory(group, step.values(group.rank, shapes[group.rank]), own)
    out = _out(own, group, (sum(rows), *step.shape[1:]), step.dtype)
    shown = memory.shown
    if out is not None and in_place:
        begin = sum(rows[: group.rank])
        shown = out.array[begin : begin + rows[group.rank]]
        shown[...] = memory.array

    def start(*, waits: bool) -> Any:
        run = group.all_gather if waits else group.all_gather_async
        return run(shown, None if out is None else out.shown, label=step.label, with_rows=with_rows)

    def want(result: Any) -> None:
        if with_rows and out is None:
            result, found = result
            assert list(found) == rows, f"{step}: {found} rows, want {rows}"
        assert_same(result, np.concatenate([step.values(rank, shapes[rank]) for rank in range(group.size)]), step)

    return _rows_act(step, team, memory, out, start, want)


def all_to_all(step: Step, team: Team, own: Dice) -> Act:
    group = team.member()
    dice, p = step.dice(), group.size
    even, with_rows = dice.random() < 0.4, bool(dice.random() < 0.3)
    most = step.shape[0] // p
    splits = np.full((p, p), most) if even else dice.integers(0, most + 1, (p, p)) * dice.integers(0, 2, (p, p))
    shapes = [(int(splits[rank].sum()), *step.shape[1:]) for rank in range(p)]
    memory = Memory(group, step.values(group.rank, shapes[group.rank]), own)
    received = splits[:, group.rank].tolist()
    out = _out(own, group, (sum(received), *step.shape[1:]), step.dtype)
    says = None if even and own.random() < 0.5 else splits[group.rank].tolist()

    def start(*, waits: bool) -> Any:
        run = group.all_to_all if waits else group.all_to_all_async
        return run(memory.shown, None if out is None else out.shown, says, label=step.label, with_rows=with_rows)

    def want(result: Any) -> None:
        if with_rows and out is None:
            result, found = result
            assert list(found) == received, f"{step}: {found} rows, want {received}"
        ends = np.cumsum(splits, axis=1)
        parts = [slice(ends[rank, group.rank] - received[rank], ends[rank, group.rank]) for rank in range(p)]
        assert_same(result, np.concatenate([step.values(rank, shapes[rank])[parts[rank]] for rank in range(p)]), step)

    return _rows_act(step, team, memory, out, start, want)


def barrier(step: Step, team: Team, _: Dice) -> Act:
    group = team.member()

    def start(*, waits: bool) -> Any:
        return (group.barrier if waits else group.barrier_async)(label=step.label)

    return Act(step, team, start, lambda _: None)


def message(step: Step, team: Team, own: Dice) -> Act | None:
    group = team.member()
    dice = step.dice()
    if group.size < 2:
        return None
    sender, receiver = (int(rank) for rank in dice.choice(group.size, 2, replace=False))
    tag, axes = int(dice.integers(3)), tuple(dice.permutation(len(step.shape)).tolist())
    if group.rank not in (sender, receiver):
        return None
    memory = Memory(group, step.values(group.rank, step.shape), own, axes)

    def start(*, waits: bool) -> Any:
        if group.rank == sender:
            return (group.send if waits else group.send_async)(memory.shown, receiver, tag)
        return (group.recv if waits else group.recv_async)(memory.shown, sender, tag)

    def check(_: Any) -> None:
        assert_same(memory.array, step.values(sender, step.shape), step)
        memory.check_around(step)

    return Act(step, team, start, check, line=(sender, receiver, tag))


def disagree(step: Step, team: Team, own: Dice) -> Act | None:
    """Return an act in which one rank passes a wrong argument; all ranks must get an error and keep their inputs."""
    group = team.member()
    dice = step.dice()
    if group.size < 2:
        return None
    how = str(dice.choice(["op", "shape", "type", "collective", "root", "label", "refused"]))
    mine = group.rank == int(dice.integers(group.size))
    changed = how if mine else ""
    shape = (step.shape[0] + (changed == "shape"), *step.shape[1:])
    op, label = "max" if changed == "op" else "sum", "another" if changed == "label" else step.label
    memory = Memory(group, np.full(shape, group.rank, "int32" if changed == "type" else "float32"), own)
    before = memory.flat.tobytes()
    refused = changed == "refused"

    def start(*, waits: bool) -> Any:
        array = memory.array
        if refused:
            array = array.view()
            array.setflags(write=False)
        if how == "root":
            return _started(group.broadcast, group.broadcast_async, array, int(mine), waits=waits, label=label)
        if changed == "collective":
            return _started(group.barrier, group.barrier_async, waits=waits, label=label)
        return _started(group.all_reduce, group.all_reduce_async, array, op, waits=waits, label=label)

    def check(_: Any) -> None:
        assert memory.flat.tobytes() == before, f"{step}: {how}: the input was changed"
        memory.check_around(step)

    return Act(step, team, start, check, refusal=ArgumentError if refused else MismatchError)


def _started(runs: Any, starts: Any, *arguments: Any, waits: bool, **options: Any) -> Any:
    """Start an operation. An argument error on start is returned as a handle that raises it on `wait`."""
    if waits:
        return runs(*arguments, **options)
    try:
        return starts(*arguments, **options)
    except ArgumentError as error:
        return _Refused(error)


class _Refused:
    def __init__(self, error: Exception) -> None:
        self._error = error

    def wait(self) -> None:
        raise self._error


ACTS: Mapping[str, Callable[[Step, Team, Dice], Act | None]] = MappingProxyType(
    {
        each.__name__: each
        for each in (
            all_reduce,
            broadcast,
            reduce_scatter,
            all_gather,
            all_to_all,
            message,
            barrier,
            repeat,
            disagree,
        )
    }
)
