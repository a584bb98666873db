"""Check whether one commit is slower than another, cell by cell.

    python benchmarks/tools/two_commits/main.py BASE [NEW] [--only NAME,...] [--minutes 60] [--alternations 10]
        [--json] [--list]

NEW defaults to HEAD. BASE may be the same commit; the result then shows the effect of chance. Uncommitted changes are
not timed. Both commits are unpacked and built in build/two_commits, and this checkout is only read. Cells between hosts
run in labs and need root. Without root they are left out, and counted.

A job is a set of processes of one commit that times some cells. Each cell is verified first. The cases, checks and
clock are those of the bench. First, every job runs once for each commit, which measures the time of a call. Then the
jobs of both commits alternate, and each alternation changes which commit comes first. A cell's ratio is BASE's seconds
divided by NEW's, once per alternation. The median of the ratios has an exact 95 % interval. A cell is slower if the
median is under 0.95 and the interval is below 1. A cell is wide if its interval is wider than +-0.08 and reaches below
0.95. A wide cell runs again with twice the alternations, and only these count. If it is still wide and not slower, it
is undecided. If time is short, the number of calls is reduced first, then the alternations.

All measurements are kept, and the same command continues an interrupted run. With --again it starts over. The exit code
is:

- 0 if all cells hold;
- 1 if a cell is slower, or fails or is wrong at NEW only, or if no cell works at BASE;
- 2 if the request is impossible;
- 3 if cells lack alternations because the minutes are over. The same command with more minutes continues.
"""

import argparse
import dataclasses
import fcntl
import json
import shlex
import shutil
import statistics
import sys
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

sys.path.insert(0, str(Path(__file__).parents[3]))  # lets this script import from the repository root

from benchmarks.tools.two_commits.cells import (
    HOLDS,
    JOBS,
    SLOWER,
    UNDECIDED,
    Again,
    Cell,
    Cost,
    Job,
    chosen,
    fitting_share,
    full_name,
    is_wide,
    run_again,
    verdict,
    with_what_they_need,
)
from benchmarks.tools.two_commits.tree import ROOT, Tree, TreeError, built, commit_of, has_changes

from multiring._bench import workers
from multiring._bench.compare import cores_for
from multiring._bench.job import JobCommand, JobError, Jobs, StoppedError, WrongResultError, answers
from multiring._bench.machine import QUIET_CORES, OtherWorkMeter, hardware, ping_pong_us
from multiring._bench.records import time_text, today
from multiring._bench.statistics import Interval, ratio_interval
from multiring._bench.workers.contract import Case
from multiring.errors import UnsupportedError
from multiring.lab.machine import require_root

CACHE = ROOT / "build" / "two_commits"
WORKER = Path(__file__).with_name("rank.py")
DEADLINE_S = 300.0
FIRST_SHARE = 0.6  # The share of the time for the alternations of all cells. The rest is for wide cells.
PROBE_CALLS, PROBE_WARMUP = 5, 2
LEAST_CALLS, MOST_CALLS = 5, 5000
SIDES = ("base", "new")
FAILS, NEVER_DID = "fails", "fails in both"
FAILED_BEFORE = "failed before"

Record = dict[str, Any]


@dataclass(slots=True)
class Known:
    """The measurements of one cell.

    Attributes:
        pairs: The seconds of BASE and NEW in each alternation, for the first run and for the repeated run.
    """

    job: Job
    cell: Cell
    calls: int = 0
    call_s: float = 0.0
    fixed_s: float = 0.0
    start_s: float = 0.0
    failed: dict[str, str] = field(default_factory=dict)
    pairs: tuple[list[tuple[float, float]], list[tuple[float, float]]] = field(default_factory=lambda: ([], []))

    @property
    def name(self) -> str:
        """The cell's full name, with its job."""
        return full_name(self.job, self.cell)

    @property
    def counted(self) -> list[tuple[float, float]]:
        """The alternations that count: those of the last run."""
        return self.pairs[1] or self.pairs[0]

    def interval(self, run: int | None = None) -> Interval:
        """Return the ratio and its interval, for the last run or for run number `run`."""
        pairs = self.counted if run is None else self.pairs[run]
        return ratio_interval([base for base, _ in pairs], [new for _, new in pairs])

    def lacks(self, run: int, turns: int) -> bool:
        """Return whether the cell still needs alternations in a run."""
        return not self.failed and len(self.pairs[run]) < turns

    def is_unfinished(self, turns: int) -> bool:
        """Return whether the cell needs more alternations, also in the run for wide cells."""
        return self.lacks(0, turns) or (self.lacks(1, 2 * turns) and is_wide(self.interval(0)))

    @property
    def verdict(self) -> str:
        """The verdict on the cell."""
        if self.failed:
            return NEVER_DID if len(self.failed) == len(SIDES) else FAILS if "new" in self.failed else FAILED_BEFORE
        return verdict(self.interval()) if self.counted else UNDECIDED


def without(line: Record, names: Collection[str]) -> Record:
    """Return a kept line without these cells and without its time."""
    made = {**line, "spent_s": 0.0}
    for key in ("pairs", "calls"):
        if key in made:
            made[key] = {name: value for name, value in made[key].items() if name not in names}
    if "cells" in made:
        made["cells"] = [name for name in made["cells"] if name not in names]
    if made.get("cell") in names:
        made["cell"] = None
    return made


@final
class Kept:
    """The file of measurements, with one line per event.

    The first line describes the run.

    Args:
        path: The file.
        heading: The first line.
        forget: The cells whose measurements are dropped. If there are any, the time spent before does not count.

    `is_new` tells whether the file had no measurements for this heading.
    """

    def __init__(self, path: Path, heading: Record, forget: Collection[str] = ()) -> None:
        self._path = path
        self.lines: list[Record] = []
        if path.exists():
            # The last line may be incomplete if a run was killed.
            texts = path.read_text(encoding="utf-8").split("\n")[:-1]
            self.lines = [json.loads(text) for text in texts]
        self.is_new = not self.lines or self.lines[0] != heading
        told = [] if self.is_new else self.lines[1:]
        self.lines = [heading, *([without(line, forget) for line in told] if forget else told)]
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".new")
        unfinished.write_text("".join(json.dumps(line) + "\n" for line in self.lines), encoding="utf-8")
        unfinished.replace(path)

    def add(self, line: Record) -> None:
        """Append a line to the file."""
        self.lines.append(line)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    @property
    def spent_s(self) -> float:
        """The seconds that all runs have taken so far."""
        return float(sum(line.get("spent_s", 0.0) for line in self.lines))

    @property
    def other_cores(self) -> float:
        """The average number of cores that other work used during the pairs of jobs."""
        found = [line["other_cores"] for line in self.lines if line.get("kind") == "turn"]
        return statistics.fmean(found) if found else 0.0


class CellError(Exception):
    """A failure of one cell, or of a job before its first cell.

    In the second case, `cells` holds all cells of the job.
    """

    def __init__(self, cells: list[Known], text: str) -> None:
        super().__init__(text)
        self.cells = cells


class TimeIsUpError(Exception):
    """Raised when the remaining time is too short for the next pair of jobs."""


@final
class Run:
    """The measurement: probes, alternations, and repeated alternations of wide cells."""

    def __init__(self, jobs: Jobs, trees: dict[str, Tree], kept: Kept, known: list[Known], until: float) -> None:
        self._jobs, self._trees, self._kept, self._known, self._until = jobs, trees, kept, known, until
        self._number = 0
        self._marked = time.monotonic()
        for line in kept.lines:
            self._take(line)

    def measure(self, turns: int, begun: float) -> None:
        """Do all missing measurements that fit into the time.

        Args:
            turns: The number of alternations in the first run.
            begun: The monotonic time from which this process counts its time.
        """
        self._marked = begun
        try:
            for cells in self._by_job(lambda each: not each.call_s and not each.failed):
                self._probe(cells)
            self._set_calls(turns)
            self._alternate(0, turns, self._known)
            self._alternate(1, 2 * turns, self._again(turns))
        except TimeIsUpError:
            tell("the minutes are over")

    def _by_job(self, wanted: Any) -> Iterable[list[Known]]:
        """Yield the cells of each job for which `wanted` is true."""
        for job in dict.fromkeys(each.job.name for each in self._known):
            if found := [each for each in self._known if each.job.name == job and wanted(each)]:
                yield found

    def _left_s(self) -> float:
        return self._until - time.monotonic()

    def _take(self, line: Record) -> None:
        """Update the cells from a line of the file."""
        kind = line.get("kind")
        for each in self._known:
            if kind == "turn" and each.name in line["pairs"]:
                base_s, new_s = line["pairs"][each.name]
                each.pairs[line["run"]].append((base_s, new_s))
            elif kind == "probe" and each.name == line["cell"]:
                each.call_s, each.fixed_s, each.start_s = line["call_s"], line["fixed_s"], line["start_s"]
            elif kind == "calls" and each.name in line["calls"]:
                each.calls = line["calls"][each.name]
            elif kind == "out" and each.name in line["cells"]:
                each.failed[line["side"]] = line["why"]

    def _keep(self, **line: Any) -> None:
        now = time.monotonic()
        spent_s, self._marked = now - self._marked, now
        made = {**line, "spent_s": round(spent_s, 3)}
        self._kept.add(made)
        self._take(made)

    def _probe(self, cells: list[Known]) -> None:
        """Verify `cells` at both commits, and measure the time of a call."""
        if self._left_s() <= 0:
            raise TimeIsUpError
        tell(f"verifying {cells[0].job.name}")
        sides = []
        for side in SIDES:  # Both sides run even if one fails, because the report names the failing sides.
            while doing := [each for each in cells if side not in each.failed]:
                try:
                    sides.append(self._job(side, doing))
                    break
                except CellError as error:
                    self._give_up(side, error)
        for each in [each for each in cells if not each.failed]:
            found = [side[each.name] for side in sides]
            call_s, fixed_s, start_s = (max(values) for values in zip(*found, strict=True))
            self._keep(kind="probe", cell=each.name, call_s=call_s, fixed_s=fixed_s, start_s=start_s)

    def _give_up(self, side: str, error: CellError) -> None:
        names = [each.name for each in error.cells]
        tell(f"{', '.join(names)} at {side}: {error}")
        self._keep(kind="out", cells=names, side=side, why=str(error))

    def _set_calls(self, turns: int) -> None:
        """Fix the number of timed calls per cell, so that all alternations fit."""
        doing = [each for each in self._known if not each.failed and not each.calls]
        names = {each.name for each in doing}
        starts_s = sum(max(each.start_s for each in cells) for cells in self._by_job(lambda each: each.name in names))
        costs = [
            Cost(fixed_s=each.fixed_s + each.job.warm_s, timed_s=max(each.job.timed_s, LEAST_CALLS * each.call_s))
            for each in doing
        ]
        share = fitting_share(costs, starts_s, turns, FIRST_SHARE * self._left_s())
        wanted = {each.name: int(share * each.job.timed_s / max(each.call_s, 1e-7)) for each in doing}
        self._keep(kind="calls", calls={name: min(max(n, LEAST_CALLS), MOST_CALLS) for name, n in wanted.items()})

    def _seconds_of(self, cells: list[Known]) -> float:
        """Return the expected seconds of a job of `cells`."""
        each_s = (each.fixed_s + each.job.warm_s + each.calls * each.call_s for each in cells)
        return max(each.start_s for each in cells) + sum(each_s)

    def _again(self, turns: int) -> list[Known]:
        """Return the wide cells to run again."""
        whole = [each for each in self._known if not each.failed and len(each.pairs[0]) >= turns]
        wide = [each for each in whole if is_wide(each.interval(0))]
        begun = {each.name for each in wide if each.pairs[1]}
        offered = [
            Again(
                name=each.name,
                job=each.job.name,
                found=each.interval(0),
                cost_s=self._seconds_of([each]) - each.start_s,
                start_s=each.start_s,
            )
            for each in wide
        ]
        names = run_again((each for each in offered if each.name not in begun), 2 * turns, self._left_s())
        return [each for each in wide if each.name in begun or each.name in names]

    def _alternate(self, run: int, turns: int, among: list[Known]) -> None:
        for turn in range(turns):
            names = {each.name for each in among if each.lacks(run, turns) and len(each.pairs[run]) <= turn}
            for cells in self._by_job(lambda each, names=names: each.name in names):
                if self._left_s() < 2 * self._seconds_of(cells):
                    raise TimeIsUpError
                what = "" if run == 0 else " of wide cells"
                tell(f"alternation {turn + 1} of {turns}{what}: {cells[0].job.name}")
                self._turn(run, turn, cells)

    def _turn(self, run: int, turn: int, cells: list[Known]) -> None:
        """Time `cells` at both commits; a failing cell is left out from now on."""
        order = SIDES if turn % 2 == 0 else SIDES[::-1]
        while doing := [each for each in cells if not each.failed]:
            meter, found = OtherWorkMeter(), {}
            for side in order:
                try:
                    found[side] = self._job(side, doing)
                except CellError as error:
                    self._give_up(side, error)
                    break
            else:
                pairs = {each.name: [found[side][each.name][0] for side in SIDES] for each in doing}
                self._keep(kind="turn", run=run, pairs=pairs, other_cores=round(meter.cores(), 4))
                return

    def _job(self, side: str, cells: list[Known]) -> dict[str, tuple[float, float, float]]:
        """Run a job; return each cell's seconds per call, overhead and job start.

        Raises:
            CellError: A cell failed.
        """
        self._number += 1
        folder, job, tree = self._jobs.folder / str(self._number), cells[0].job, self._trees[side]
        folder.mkdir()
        joined, case_file = folder / "joined", folder / "job.json"
        cases = [_case(each, side, folder / str(index)) for index, each in enumerate(cells)]
        described = {
            "tree": str(tree.source),
            "workers": str(Path(workers.__file__).parent),
            "tasks": str(WORKER.parent),
            "adapter": job.adapter,
            "joined": str(joined),
            "cells": [
                {"manner": each.cell.manner, "wire": each.cell.wire, "case": dataclasses.asdict(case)}
                for each, case in zip(cells, cases, strict=True)
            ],
        }
        case_file.write_text(json.dumps(described), encoding="utf-8")
        begun = time.time()
        try:
            self._jobs.run(f"{job.name} at {tree.commit[:12]}", _start(tree, job, case_file))
        except JobError as error:
            raise _failure(cells, cases, str(error), has_joined=joined.exists()) from None
        found, last = {}, joined.stat().st_mtime
        start_s = last - begun
        for each, case in zip(cells, cases, strict=True):
            given = answers(Path(case.out_dir), job.ranks)
            if len(given) != job.ranks:
                raise CellError([each], f"only {len(given)} of {job.ranks} ranks wrote their results")
            ended = (Path(case.out_dir) / "rank-0.json").stat().st_mtime
            fixed_s = max(ended - last - sum(given[0].seconds), 0.0)
            found[each.name] = (max(statistics.median(answer.seconds) for answer in given), fixed_s, start_s)
            last = ended
        shutil.rmtree(folder)
        return found


def _case(known: Known, side: str, out_dir: Path) -> Case:
    out_dir.mkdir()
    cell, job = known.cell, known.job
    call_s = max(known.call_s, 1e-7)
    return Case(
        library=f"{full_name(job, cell)} at {side}",
        collective=cell.collective,
        dtype=cell.dtype,
        count=cell.question(job.ranks).count,
        out_dir=str(out_dir),
        buffers=cell.buffers,
        pool_bytes=cell.pool_bytes,
        calls=known.calls or PROBE_CALLS,
        warmup=int(min(max(job.warm_s / call_s, PROBE_WARMUP), MOST_CALLS)) if known.call_s else PROBE_WARMUP,
        cores=() if job.lab else cores_for(job.ranks),
    )


_VARIABLES = {"OMP_NUM_THREADS": "1", "PYTHONPATH": "", "KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3"}


def _start(tree: Tree, job: Job, case_file: Path) -> JobCommand:
    python = str(tree.python)
    how = ("lab", *job.lab) if job.lab else ("run", "-n", str(job.ranks))
    command = (python, "-m", "multiring", *how, "--", python, str(WORKER), str(case_file))
    return JobCommand(command=command, variables=_VARIABLES)


def _failure(cells: list[Known], cases: list[Case], text: str, *, has_joined: bool) -> CellError:
    """Return the error with the cell that failed.

    This is the first cell without answers from all ranks, or all cells if the job failed before the first one.
    """
    if not has_joined:
        return CellError(cells, text)
    for each, case in zip(cells, cases, strict=True):
        try:
            if len(answers(Path(case.out_dir), each.job.ranks)) < each.job.ranks:
                return CellError([each], text)
        except WrongResultError as error:
            return CellError([each], str(error))
    return CellError(cells, text)  # the job failed at its end, after all cells


# ---- output ----


def tell(text: str) -> None:
    """Print progress to standard error."""
    print(f"two_commits: {text}", file=sys.stderr, flush=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Circumstances:
    """The conditions under which a run's numbers were measured."""

    base: str
    new: str
    hardware: str
    ping_pong_us: float
    other_cores: float
    command: str

    @property
    def is_quiet(self) -> bool:
        """Whether the machine was quiet enough to publish the numbers."""
        return self.other_cores <= QUIET_CORES

    def lines(self) -> list[str]:
        """Return the conditions as lines of text."""
        quiet = "" if self.is_quiet else f", more than {QUIET_CORES:.0%}: not publishable"
        machine = f"{self.hardware}; pipe ping-pong {self.ping_pong_us:.1f} us"
        other = f"other work {self.other_cores:.0%} of a core{quiet}"
        return [f"    {self.command}", "", f"{self.new} against {self.base}, {today()}, {machine}; {other}."]


def table(known: Sequence[Known]) -> list[str]:
    """Return the cells as a Markdown table."""
    lines = ["| cell | base | new | ratio | alternations | |", "|---|---|---|---|---|---|"]
    for each in known:
        if each.counted:
            base_s, new_s = (statistics.median(values) for values in zip(*each.counted, strict=True))
            found = each.interval()
            ratio = f"{found.middle:.3f} [{found.low:.3f}, {found.high:.3f}]"
            cells = [time_text(base_s), time_text(new_s), ratio, str(len(each.counted))]
        else:
            cells = ["", "", "", "0"]
        lines.append(f"| {each.name} | {' | '.join(cells)} | {each.verdict} |")
    return lines


def summary(known: Sequence[Known], turns: int) -> list[str]:
    """Return the number of cells per verdict, the unfinished cells and the failures."""
    verdicts = [each.verdict for each in known]
    counts = ", ".join(f"{verdicts.count(word)} {word}" for word in dict.fromkeys((HOLDS, SLOWER, *verdicts)))
    lines = [f"{len(known)} cells: {counts}."]
    if unfinished := sum(each.is_unfinished(turns) for each in known):
        lines.append(
            f"The minutes were over before {unfinished} of them had all alternations; with more --minutes it goes on."
        )
    for each in known:
        lines += [f"- {each.name} at {side}: {why.splitlines()[0]}" for side, why in each.failed.items()]
    return lines


def records(known: Sequence[Known], circumstances: Circumstances) -> list[Record]:
    """Return an object for each cell, as --json prints it."""
    made = []
    for each in known:
        found = each.interval() if each.counted else None
        made.append(
            {
                "cell": each.name,
                "ranks": each.job.ranks,
                "lab": " ".join(each.job.lab),
                **dataclasses.asdict(each.cell),
                "calls": each.calls,
                "base_seconds": [base for base, _ in each.counted],
                "new_seconds": [new for _, new in each.counted],
                "ratio": found and found.middle,
                "interval": found and [found.low, found.high],
                "level": found and found.level,
                "verdict": each.verdict,
                "failed": each.failed,
                **dataclasses.asdict(circumstances),
                "publishable": circumstances.is_quiet and found is not None and found.is_sure,
                "date": today(),
            }
        )
    return made


def exit_code(known: Sequence[Known], turns: int) -> int:
    """Return the exit code of the command."""
    if any(each.verdict in {SLOWER, FAILS} for each in known):
        return 1
    if known and all(each.verdict in {NEVER_DID, FAILED_BEFORE} for each in known):
        return 1  # nothing was compared
    return 3 if any(each.is_unfinished(turns) for each in known) else 0


# ---- the command ----


def without_labs(jobs: list[Job]) -> list[Job]:
    """Return the jobs that this user can run; report the cells left out without root."""
    try:
        require_root()
    except UnsupportedError as error:
        left_out = sum(len(job.cells) for job in jobs if job.lab)
        if left_out:
            tell(f"left out: {left_out} cells between hosts: {error}")
        return [job for job in jobs if not job.lab]
    return jobs


def without_frameworks(jobs: list[Job]) -> list[Job]:
    """Return the jobs whose frameworks are installed; report the cells left out."""
    able, left_out = with_what_they_need(jobs)
    for module, names in left_out.items():
        tell(f"left out: {len(names)} cells that need {module}, which is not installed: {', '.join(names)}")
    return able


def parsed() -> argparse.Namespace:
    """Return the command line's arguments; `jobs` holds the jobs selected by --only."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", nargs="?", help="the commit to compare with")
    parser.add_argument("new", nargs="?", help="the commit to judge (default HEAD)")
    parser.add_argument("--only", metavar="NAME,...", help="beginnings of the names of cells or jobs")
    parser.add_argument("--minutes", type=float, default=60.0, help="total time, including the builds (%(default)g)")
    parser.add_argument(
        "--alternations", type=int, default=10, help="alternations of each cell, at least 6 (%(default)s)"
    )
    parser.add_argument(
        "--again", action="store_true", help="drop the kept measurements and the time spent on these cells"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per line instead of a table")
    parser.add_argument("--list", action="store_true", help="print the cells' names and measure nothing")
    args = parser.parse_args()
    if args.base is None and not args.list:
        parser.error("want the commit to hold against, like 6cd2d84, or --list")
    if args.alternations < 6:
        parser.error(f"--alternations {args.alternations}: want at least 6, fewer have no interval of 95 %")
    if not args.minutes > 0:
        parser.error(f"--minutes {args.minutes:g}: want more than 0")
    try:
        args.jobs = list(JOBS) if args.only is None else chosen(args.only.split(","))
    except ValueError as error:
        parser.error(f"--only: {error}")
    return args


def main() -> int:
    """Run the command; return its exit code."""
    begun = time.monotonic()
    args = parsed()
    if args.list:
        print("\n".join(full_name(job, cell) for job in args.jobs for cell in job.cells))
        return 0
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            tell("another run is going on in this checkout; two would disturb each other")
            return 2
        try:
            return measured(args, begun)
        except TreeError as error:
            tell(str(error))
            return 2
        except StoppedError as error:
            tell(f"{error}; the same command goes on from here")
            return error.exit_code


def measured(args: argparse.Namespace, begun: float) -> int:
    """Measure, print the results and return the exit code."""
    names = dict(zip(SIDES, (args.base, args.new or "HEAD"), strict=True))
    commits = {side: commit_of(name) for side, name in names.items()}
    if has_changes() and commits["new"] == commit_of("HEAD"):
        tell(f"this checkout has changes that are not in {commits['new'][:12]}: they are NOT timed, commit them first")
    heading = {"kind": "run", **commits, "hardware": hardware(), "alternations": args.alternations}
    path = CACHE / f"{commits['base'][:12]}-{commits['new'][:12]}-{args.alternations}.jsonl"
    known = [Known(job, cell) for job in without_frameworks(without_labs(args.jobs)) for cell in job.cells]
    kept = Kept(path, heading, {each.name for each in known} if args.again else ())
    tell(f"{'kept in' if kept.is_new else f'going on, after {kept.spent_s / 60:.0f} minutes, with'} {path}")
    trees = {side: built(commit, CACHE) for side, commit in commits.items()}
    until = begun + 60 * args.minutes - kept.spent_s
    with Jobs(DEADLINE_S) as children:
        Run(children, trees, kept, known, until).measure(args.alternations, begun)
    circumstances = Circumstances(
        base=commits["base"][:12],
        new=commits["new"][:12],
        hardware=heading["hardware"],
        ping_pong_us=round(ping_pong_us(), 1),
        other_cores=round(kept.other_cores, 3),
        command=shlex.join(["python", "benchmarks/tools/two_commits/main.py", *sys.argv[1:]]),
    )
    if args.json:
        print("\n".join(json.dumps(record) for record in records(known, circumstances)))
    else:
        print("\n".join([*circumstances.lines(), "", *table(known), "", *summary(known, args.alternations)]))
    return exit_code(known, args.alternations)


if __name__ == "__main__":
    sys.exit(main())
