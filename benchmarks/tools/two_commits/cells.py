"""Define the cells of main.py, the verdicts and the use of the time.

This module holds only values and arithmetic. A ratio is the base commit's seconds divided by the new commit's seconds:
below 1, the new commit is slower.
"""

import importlib.util
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from multiring._bench.cases import Question
from multiring._bench.statistics import Interval

FLOOR = 0.95
MOST_HALF_WIDTH = 0.08
HOLDS, SLOWER, UNDECIDED = "holds", "slower", "undecided"
# With a smaller share of timed calls, the start of a job is not worthwhile. Then the run has fewer alternations and
# reports that.
LEAST_SHARE = 0.2
KIB, MIB = 2**10, 2**20
POOL_BYTES = 512 * MIB
BURST = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """An operation at one size, timed with one manner of calls.

    Attributes:
        name: The name within the job.
        manner: "sync" blocks; "async" starts and waits; "burst" starts `BURST` calls and waits for all. "named" and
            "grouped" are those of multiring.torch, with one tensor and with `BURST` tensors at once. "adapter" blocks,
            with the eager collective of the job's adapter. Any other manner is a task of tasks.py, not a
            collective.
        pool_bytes: 0 for a single buffer; otherwise calls rotate over this much memory.
        wire: The wire type of an all_reduce between hosts, or "" for none.
    """

    name: str
    collective: str
    size_bytes: int
    manner: str = "sync"
    dtype: str = "float32"
    buffers: str = "arena"
    pool_bytes: int = 0
    wire: str = ""

    def question(self, ranks: int) -> Question:
        """Return the cell as a question of the bench."""
        return Question(collective=self.collective, ranks=ranks, size_bytes=self.size_bytes, dtype=self.dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """The cells that one set of processes times one after the other.

    Attributes:
        lab: The options of `multiring lab`; empty for one host.
        adapter: The framework adapter through which the ranks join, or "" for none.
        needs: The modules that must be installed.
        timed_s: The time that a cell's timed calls should take.
        warm_s: The time that the calls before them should take.
    """

    name: str
    ranks: int
    cells: tuple[Cell, ...]
    lab: tuple[str, ...] = ()
    adapter: str = ""
    needs: tuple[str, ...] = ()
    timed_s: float = 0.3
    warm_s: float = 0.05


def _size(size_bytes: int) -> str:
    for unit, one in (("MiB", MIB), ("KiB", KIB)):
        if size_bytes >= one:
            return f"{size_bytes // one}{unit}"
    return f"{size_bytes}B"


def _one_host(collective: str) -> Job:
    cells = tuple(
        Cell(name=f"{buffers}/{_size(size)}", collective=collective, size_bytes=size, buffers=buffers)
        for buffers in ("arena", "ordinary")
        for size in (64, 4 * KIB, 64 * KIB, MIB, 8 * MIB, 64 * MIB)
    )
    return Job(name=f"one/{collective}", ranks=2, cells=cells)


def _pool(collective: str, sizes: Sequence[int], *memory: str) -> Job:
    cells = tuple(
        Cell(
            name=f"{buffers}/{_size(size)}",
            collective=collective,
            size_bytes=size,
            buffers=buffers,
            pool_bytes=POOL_BYTES,
        )
        for buffers in memory
        for size in sizes
    )
    return Job(name=f"pool/{collective}", ranks=2, cells=cells)


def _lab(name: str, options: str, ranks: int, *cells: Cell) -> Job:
    # The warm-up empties the token buckets of the links, so their initial burst is not timed.
    return Job(name=f"hosts/{name}", ranks=ranks, cells=cells, lab=tuple(options.split()), timed_s=1.0, warm_s=0.4)


def _reduced(*sizes: int) -> tuple[Cell, ...]:
    return tuple(Cell(name=f"all_reduce/{_size(size)}", collective="all_reduce", size_bytes=size) for size in sizes)


def _others(size: int) -> tuple[Cell, ...]:
    return tuple(Cell(name=f"{each}/{_size(size)}", collective=each, size_bytes=size) for each in OTHERS)


def _small(name: str, manner: str, size: int = 64, collective: str = "all_reduce") -> Cell:
    # a burst or a group needs as many buffers as it has calls
    pool_bytes = BURST * size if manner in {"burst", "grouped"} else 0
    return Cell(name=name, collective=collective, size_bytes=size, manner=manner, pool_bytes=pool_bytes)


def _coded(wire: str) -> Cell:
    return Cell(name=f"all_reduce/8MiB/{wire}", collective="all_reduce", size_bytes=8 * MIB, wire=wire)


def _task(name: str, manner: str) -> Cell:
    return Cell(name=name, collective="barrier", size_bytes=0, manner=manner)


def _adapter(adapter: str, *cells: Cell) -> Job:
    first = Cell(name="all_reduce/1KiB", collective="all_reduce", size_bytes=KIB, manner="adapter", buffers="ordinary")
    return Job(name=adapter, ranks=2, cells=(first, *cells), adapter=adapter, needs=ADAPTERS[adapter])


# The modules that each adapter needs to be imported.
ADAPTERS = {
    "torch": ("torch",),
    "tensorflow": ("tensorflow",),
    "jax": ("jax",),
    "keras": ("keras", "tensorflow"),
    "chainer": ("chainer", "chainermn"),
}
OTHERS = ("reduce_scatter", "all_gather", "broadcast", "all_to_all")
JOBS = (
    *(_one_host(collective) for collective in ("all_reduce", *OTHERS)),
    Job(
        name="one/bfloat16",
        ranks=2,
        cells=(Cell(name="arena/32MiB", collective="all_reduce", size_bytes=32 * MIB, dtype="bfloat16"),),
    ),
    _pool("all_reduce", (MIB, 8 * MIB, 64 * MIB), "arena", "ordinary"),
    *(_pool(collective, (8 * MIB,), "arena") for collective in ("reduce_scatter", "all_gather")),
    Job(name="four/all_reduce", ranks=4, cells=_reduced(64 * KIB, 8 * MIB, 64 * MIB)),
    Job(
        name="small",
        ranks=2,
        cells=(
            Cell(name="barrier", collective="barrier", size_bytes=0),
            _small("async/64B", "async"),
            _small("async/64KiB", "async", 64 * KIB),
            _small("burst/64B", "burst"),
            _small("burst/64KiB", "burst", 64 * KIB),
        ),
    ),
    Job(
        name="named",
        ranks=2,
        cells=(
            _small("64B", "named"),
            _small("64KiB", "named", 64 * KIB),
            _small("grouped/4KiB", "grouped", 4 * KIB),
        ),
        adapter="torch",
        needs=ADAPTERS["torch"],
    ),
    _adapter("torch", _task("step", "step"), _task("save/64MiB", "save"), _task("load/64MiB", "load")),
    _adapter("keras", _task("fit/distribute", "fit distribute"), _task("fit/optimizer", "fit optimizer")),
    *(_adapter(each) for each in ("tensorflow", "jax", "chainer")),
    Job(
        name="loader",
        ranks=2,
        cells=(_task("threads", "loader threads"), _task("processes", "loader processes")),
        timed_s=1.0,
    ),
    _lab("two", "--hosts 2 --slots 4 --link 1gbit", 8, *_reduced(4 * KIB, 8 * MIB, 32 * MIB)),
    _lab(
        "four",
        "--hosts 4 --slots 2 --link 1gbit",
        8,
        *_reduced(64, 4 * KIB, 64 * KIB, MIB, 8 * MIB, 32 * MIB),
        *_others(MIB),
        *(_coded(wire) for wire in ("bf16", "int8")),
    ),
    _lab(
        "racks",
        "--hosts 8 --slots 1 --link 1gbit --rack 2 --uplink 500mbit",
        8,
        *_reduced(4 * KIB, 8 * MIB, 32 * MIB),
    ),
    _lab("rails", "--hosts 4 --slots 1 --link 1gbit --rail 250mbit", 4, *_reduced(8 * MIB, 32 * MIB)),
    _lab("unshaped", "--hosts 2 --slots 1", 2, *_reduced(64, 4 * KIB, 64 * KIB, MIB, 8 * MIB, 32 * MIB)),
)


def full_name(job: Job, cell: Cell) -> str:
    """Return the cell's name on the command line and in records."""
    return f"{job.name}/{cell.name}"


def chosen(patterns: Sequence[str], jobs: Iterable[Job] = JOBS) -> list[Job]:
    """Return the jobs, reduced to the cells whose names begin with one of `patterns`.

    A pattern must match whole parts of a name.

    Raises:
        ValueError: No cell's name begins with a pattern. The message names the pattern.
    """
    unused, found = set(patterns), []
    for job in jobs:
        cells = []
        for cell in job.cells:
            meant = {each for each in patterns if f"{full_name(job, cell)}/".startswith(f"{each.rstrip('/')}/")}
            unused -= meant
            if meant:
                cells.append(cell)
        if cells:
            found.append(replace(job, cells=tuple(cells)))
    if unused:
        raise ValueError(f"no cell's name begins with {', '.join(sorted(unused))}; --list prints them")
    return found


def is_installed(module: str) -> bool:
    """Return whether this environment has a module with this name."""
    return importlib.util.find_spec(module) is not None


def with_what_they_need(
    jobs: Iterable[Job], has: Callable[[str], bool] = is_installed
) -> tuple[list[Job], dict[str, list[str]]]:
    """Return the jobs whose modules are all installed, and the cells of the others.

    The names of these cells are grouped by missing module.
    """
    able: list[Job] = []
    left_out: dict[str, list[str]] = {}
    for job in jobs:
        missing = [module for module in job.needs if not has(module)]
        if missing:
            left_out.setdefault(missing[0], []).extend(full_name(job, cell) for cell in job.cells)
        else:
            able.append(job)
    return able, left_out


# ---- verdicts on ratios ----


def is_wide(found: Interval) -> bool:
    """Return whether an interval is too wide to decide without more alternations.

    An interval that lies wholly above the floor decides, however wide it is.
    """
    return (found.high - found.low) / 2 > MOST_HALF_WIDTH and found.low < FLOOR


def verdict(found: Interval) -> str:
    """Return the verdict on a cell from its last interval.

    The verdict is slower if that is sure, and undecided if the interval is too wide. Fewer than six alternations have
    no 95 % interval, so the verdict is undecided.
    """
    if not found.is_sure:
        return UNDECIDED
    if found.middle < FLOOR and found.high < 1:
        return SLOWER
    return UNDECIDED if is_wide(found) else HOLDS


# ---- time ----


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """The expected seconds of a cell in a job.

    Attributes:
        fixed_s: The overhead, mostly the verification.
        timed_s: The time for the timed calls.
    """

    fixed_s: float
    timed_s: float


def fitting_share(costs: Sequence[Cost], starts_s: float, turns: int, budget_s: float) -> float:
    """Return the share of `timed_s` with which all alternations fit into the budget.

    Args:
        costs: The costs of all cells.
        starts_s: The start times of all jobs of one commit, summed.
        turns: The number of alternations, each with a job of both commits.
        budget_s: The time for all alternations.

    Returns:
        A share from `LEAST_SHARE` to 1. With `LEAST_SHARE`, the alternations may not fit.
    """
    wanted_s = sum(cost.timed_s for cost in costs)
    left_s = budget_s / (2 * turns) - starts_s - sum(cost.fixed_s for cost in costs)
    return min(max(left_s / wanted_s, LEAST_SHARE), 1.0) if wanted_s > 0 else 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Again:
    """A cell with a wide interval, and the seconds that one more job with it takes.

    Attributes:
        cost_s: The seconds of the cell.
        start_s: The seconds to start its job.
    """

    name: str
    job: str
    found: Interval
    cost_s: float
    start_s: float


def run_again(wide: Iterable[Again], turns: int, budget_s: float) -> list[str]:
    """Return the cells that fit into the time for `turns` more alternations.

    Cells that are likely slower come first.
    """
    names: list[str] = []
    started: set[str] = set()
    left_s = budget_s / (2 * turns)
    for each in sorted(wide, key=lambda each: each.found.middle):
        needed_s = each.cost_s + (0.0 if each.job in started else each.start_s)
        if needed_s <= left_s:
            left_s -= needed_s
            started.add(each.job)
            names.append(each.name)
    return names
