"""Random programs of a group's collectives on stand-in devices, without a framework, against NumPy.

All ranks run the same program, which a seed makes, over NCCL or through host memory. Types, sizes (zero included),
collectives, arrays of another library, streams, twins and subgroups that come and go with operations in flight, the
order of calls on different groups, dropped handles and arrays, and calls that are wrong on one rank are random. New
arrays take the memory of those that are gone at once, and must keep their values.
"""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tests.standin.loading import load, reports
from tests.support.cuda_ranks import RANKS_PER_HOST, Copy, OtherArray, device_array, new_stream, pinned_array
from tests.support.ranks import Here

from multiring import Group
from multiring._runtime.arrays import numpy_dtype
from multiring._runtime.engines.contract import RevokedError
from multiring.errors import ArgumentError, MismatchError, MultiringError

STEPS = 40
OLD_NCCL, NEW_NCCL = 21700, 22809
REDUCED = ("bool", "int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "bfloat16", "float32", "float64")
MOVED = (*REDUCED, "int16", "uint16")
OPS: dict[str, Callable[..., Any]] = {"sum": np.add, "product": np.multiply, "min": np.minimum, "max": np.maximum}
SHAPES: tuple[tuple[int, ...], ...] = ((), (0,), (0, 3), (1,), (7,), (9, 5), (100,), (33, 31), (20_000,))
KINDS = ("reduce", "reduce", "reduce", "broadcast", "scatter", "gather", "exchange", "barrier")
MOST_GROUPS, MOST_GUARDS = 5, 12
LIMIT_S = 120.0  # a wait that takes longer is a fault


@dataclass(frozen=True, slots=True)
class Started:
    """An operation in flight.

    handle: its handle, or the error that its call raised.
    array: what it works on; None if the program has dropped it.
    wanted: the contents of the result.
    found: returns the result.
    is_wrong: whether a rank's call is wrong.
    """

    what: str
    handle: Any
    found: Callable[[Any], Any]
    wanted: NDArray[Any] | None
    is_wrong: bool


@dataclass(slots=True)
class Known:
    """A group, its ranks in the job, and whether operations may be wrong there."""

    group: Group
    ranks: list[int]


class EngineProgram:
    """One rank's run of the program of a seed."""

    def __init__(self, here: Here, seed: int, groups: list[Known], device: int) -> None:
        self.rank, self.seed, self.device = here.rank, seed, device
        self.dice = random.Random(seed)  # noqa: S311 -- the same on all ranks
        self.own = random.Random(f"{seed} {here.rank}")  # noqa: S311 -- of this rank
        self.base, self.groups = groups[0], list(groups)
        self.is_staged = groups[0].group.calls.engine.name == "staged"  # type: ignore[union-attr]
        self.streams = [new_stream() for _ in range(2)]
        self.pending: list[Started] = []
        self.guards: list[tuple[Any, float]] = []
        self.number = 0

    def run(self, steps: int) -> None:
        """Run the program."""
        for _ in range(steps):
            self.number += 1
            draw = self.dice.random()
            if draw < 0.08:
                self.change_groups()
            elif draw < 0.2:
                self.err()
            elif draw < 0.35:
                self.start_in_any_order()
            else:
                self.keep(self.start(self.dice.choice(self.groups), self.number))
            self.guard()
            while self.pending and self.own.random() < 0.4:  # each rank waits in an order of its own
                self.end(self.pending.pop(self.own.randrange(len(self.pending))))
            if self.own.random() < 0.1:
                time.sleep(self.own.random() * 0.004)
        if self.dice.random() < 0.7:
            self.settle()
        self.check_guards(0)

    # ---- operations ----

    def values(self, rank: int, shape: tuple[int, ...], dtype: str, salt: int) -> NDArray[Any]:
        """Return what a rank passes to an operation: small whole numbers, whose sums are exact in every type."""
        dice = np.random.default_rng((self.seed, salt, rank))
        found: NDArray[Any] = dice.integers(0, 2 if dtype == "bool" else 4, shape).astype(numpy_dtype(dtype))
        return found

    def array(self, group: Group, values: NDArray[Any], dice: random.Random) -> Any:
        """Return the values in an array of the group, or of another library."""
        draw = dice.random(), self.own.random()
        if draw[0] < 0.2 and values.dtype.kind in "iuf" and values.size and values.ndim:
            return OtherArray(values, self.device)
        if draw[1] < 0.3 and values.size:
            pinned = pinned_array(values)
            found = device_array(group, pinned)
            pinned[...] = 1  # the caller may change what it has given
            return found
        return device_array(group, values)

    def start(self, known: Known, salt: int, wrong: str = "", culprit: int = -1) -> Started | None:
        """Start an operation; return None if this rank is not in the group."""
        dice = random.Random(f"{self.seed} {salt}")  # noqa: S311 -- the same on all ranks, in any order of the calls
        kind, ranks, size = dice.choice(KINDS), known.ranks, len(known.ranks)
        dtype = dice.choice(MOVED if kind in ("broadcast", "gather", "exchange") or self.is_staged else REDUCED)
        if kind in ("reduce", "scatter") and dtype in ("int16", "uint16") and not self.is_staged:
            dtype = "int32"
        shape, op, root = dice.choice(SHAPES), dice.choice(list(OPS)), dice.randrange(size)
        if kind in ("scatter", "gather", "exchange"):
            shape = (dice.choice((0, 1, 4, 300)) + (kind == "scatter"), *shape[1:])
        counts = [dice.randint(0, 9) for _ in ranks]
        is_even, with_wire = dice.random() < 0.5, dice.random() < 0.5
        if self.rank not in ranks:
            return None
        group, place = known.group, ranks.index(self.rank)
        if kind == "gather" and not is_even:
            own_shape, shapes = (counts[place], *shape[1:]), [(each, *shape[1:]) for each in counts]
        else:
            own_shape, shapes = shape, [shape] * size
        if kind == "exchange":
            own_shape, shapes = (shape[0] * size, *shape[1:]), [(shape[0] * size, *shape[1:])] * size
        every = [self.values(rank, each, dtype, salt) for rank, each in zip(ranks, shapes, strict=True)]
        given: Any = None
        is_culprit = place == culprit
        what = f"{kind} {op} {dtype} {own_shape} of {ranks}, {wrong}, step {self.number}"
        try:
            if kind != "barrier":
                given = self.array(group, every[place], dice)
            if is_culprit:
                given = np.ones(4) if wrong == "host" else device_array(group, np.ones(3, np.float64))
                return Started(what, group.all_reduce_async(given), contents, None, is_wrong=True)
            return self.call(group, (kind, op, root, with_wire, wrong), given, every, place, what)
        except MultiringError as error:
            return Started(what, error, lambda _: None, None, bool(wrong))

    def call(
        self, group: Group, how: tuple[str, str, int, bool, str], given: Any, every: list[Any], place: int, what: str
    ) -> Started:
        kind, op, root, with_wire, wrong = how
        handle: Any
        found: Callable[[Any], Any] = partial(contents_of, given)
        wanted: NDArray[Any] | None = None
        match kind:
            case "reduce":
                wire = "bf16" if self.is_staged and with_wire and op == "sum" and every[0].dtype == np.float32 else None
                handle = group.all_reduce_async(given, op, wire=wire) if wire else group.all_reduce_async(given, op)
                wanted = combined(every, op)
            case "broadcast":
                handle, wanted = group.broadcast_async(given, root), every[root]
            case "scatter":
                handle, found = group.reduce_scatter_async(given, op=op), contents
                wanted = np.array_split(combined(every, op), len(every))[place]
            case "gather":
                handle, found, wanted = group.all_gather_async(given), contents, np.concatenate(every)
            case "exchange":
                rows = len(every[0]) // len(every)
                handle, found = group.all_to_all_async(given), contents
                wanted = np.concatenate([each[place * rows : (place + 1) * rows] for each in every])
            case _:
                handle, found = group.barrier_async(), lambda _: None
        return Started(what, handle, found, wanted, bool(wrong))

    def keep(self, started: Started | None) -> None:
        """Keep the operation in flight, wait for it, drop it, or order a stream behind it."""
        if started is None:
            return
        draw = self.own.random()
        if draw < 0.3:
            self.end(started)
        elif draw < 0.55 and not started.is_wrong:
            return  # the handle and the array are gone
        elif draw < 0.75 and not started.is_wrong and hasattr(started.handle, "order"):
            self.order(started)
        else:
            self.pending.append(started)

    def order(self, started: Started) -> None:
        """Have a stream of the program wait for the result, and copy it."""
        stream = self.own.choice(self.streams)
        result = started.handle.order(stream.value)
        if started.wanted is None or not started.wanted.size:
            return
        array = result if result is not None else started.found.args[0]  # type: ignore[attr-defined]
        if not hasattr(array, "address"):
            return
        found = Copy(array.address, np.empty_like(started.wanted), stream)
        del array, result
        require(found.get(), started)

    def end(self, started: Started) -> str:
        """Wait for an operation, and compare its result."""
        if isinstance(started.handle, MultiringError):
            require_error(started.handle, started)
            return "refused"
        try:
            result = started.handle.wait(LIMIT_S)
        except (ArgumentError, MismatchError) as error:
            require_error(error, started)
            return "refused"
        except RevokedError:
            return "ended"
        assert not started.is_wrong, (self.seed, started.what, "should have failed")
        require(started.found(result), started)
        return "right"

    def settle(self) -> None:
        """End what is in flight."""
        self.own.shuffle(self.pending)
        while self.pending:
            assert self.end(self.pending.pop()) == "right"

    def leave_with_operations(self) -> None:
        """Start operations for which no rank waits. The process ends with them in flight."""
        for each in range(4):
            self.start(self.dice.choice(self.groups), 1_000_000 + each)

    # ---- what happens beside them ----

    def start_in_any_order(self) -> None:
        """Start operations of several groups, in an order of this rank."""
        chosen = self.dice.sample(self.groups, min(len(self.groups), 3))
        salts = [self.number * 100 + place for place in range(len(chosen))]
        starts: list[Started | None] = [None] * len(chosen)
        order = list(range(len(chosen)))
        self.own.shuffle(order)
        for place in order:
            starts[place] = self.start(chosen[place], salts[place])
        for each in starts:
            self.keep(each)

    def change_groups(self) -> None:
        """Make a group, or drop one with operations in flight."""
        if len(self.groups) >= MOST_GROUPS or (len(self.groups) > 1 and self.dice.random() < 0.5):
            del self.groups[self.dice.randrange(1, len(self.groups))]
            return
        size = len(self.base.ranks)
        ranks = sorted(self.dice.sample(range(size), self.dice.randint(1, size)), key=lambda _: self.dice.random())
        parent = self.base.group
        if len(ranks) == size:
            self.groups.append(Known(parent.twin(), self.base.ranks))
        else:
            made = parent.subgroup(ranks)
            self.groups.append(Known(made, ranks))  # type: ignore[arg-type] # None where this rank is not in it

    def err(self) -> None:
        """Have one rank's call be wrong; operations that follow may end with it, on all ranks."""
        known = self.dice.choice(self.groups)
        wrong, culprit = self.dice.choice(("other", "host")), self.dice.randrange(len(known.ranks))
        if len(known.ranks) == 1 and wrong == "other":
            wrong = "host"
        first = self.start(known, self.number * 100 + 90, wrong, culprit)
        later = [self.start(known, self.number * 100 + 91 + each) for each in range(self.dice.randint(0, 3))]
        if first is None:
            return
        outcomes = [self.end(each) for each in (first, *later) if each is not None]
        assert outcomes[0] == "refused", (self.seed, first.what, outcomes)

    def guard(self) -> None:
        """Take the memory of arrays that are gone, and check later that nothing writes there."""
        group, value = self.base.group, float(self.number)
        for _ in range(self.own.randint(0, 3)):
            shape = self.own.choice(SHAPES)
            kind = self.own.choice(("float32", "float64"))
            self.guards.append((device_array(group, np.full(shape, value, kind)), value))
        self.check_guards(MOST_GUARDS)

    def check_guards(self, most: int) -> None:
        """Check and drop the oldest arrays."""
        while len(self.guards) > most:
            array, value = self.guards.pop(0)
            assert (array.get() == value).all(), (self.seed, self.number, "another array's values came here")


def combined(operands: list[Any], op: str) -> NDArray[Any]:
    """Return NumPy's reduction."""
    total = operands[0]
    for each in operands[1:]:
        total = OPS[op](total, each)
    return np.asarray(total)


def contents(array: Any) -> Any:
    """Return what is in an array now."""
    return array.now() if isinstance(array, OtherArray) else None if array is None else array.get()


def contents_of(array: Any, _: Any) -> Any:
    """Return what is in an array now, whatever the operation's result."""
    return contents(array)


def require(found: Any, started: Started) -> None:
    """Assert that the result is right."""
    if started.wanted is not None:
        is_right = found.shape == started.wanted.shape and (found == started.wanted).all()
        assert is_right, (started.what, found, started.wanted)


def require_error(error: MultiringError, started: Started) -> None:
    """Assert that an operation failed that was to fail."""
    assert started.is_wrong, (started.what, error)


def run_engine_programs(here: Here, seeds: list[int], engine: str, delay_us: int = 1000) -> None:
    """Run the programs of some seeds on a group of the engine "nccl" or "staged"."""
    per_host = RANKS_PER_HOST[here.engine]
    host = here.join()
    nccl = OLD_NCCL if engine == "staged" else NEW_NCCL
    load(devices=4, host=here.rank // per_host, nccl=nccl, delay_us=delay_us, seed=seeds[0])
    # Ranks of the engine staged may share a device.
    device = 0 if engine == "staged" and seeds[0] % 2 else here.rank % min(per_host, 4)
    group = host.on_device(device)
    assert group.calls.engine is not None
    assert group.calls.engine.name == engine
    for seed in seeds:
        program = EngineProgram(here, seed, [Known(group, list(range(here.size)))], device)
        program.run(STEPS)
        program.settle()
        host.barrier()
        if seed == seeds[-1]:
            program.leave_with_operations()
        del program
    assert engine == "staged" or not [each for each in reports() if "wrong order" in each], reports()
