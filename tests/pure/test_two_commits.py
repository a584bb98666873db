"""benchmarks/tools/two_commits/main.py: its verdicts on ratios, its use of a time budget, and its stored results."""

import json
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from benchmarks.tools.two_commits import main as two_commits
from benchmarks.tools.two_commits.cells import (
    HOLDS,
    JOBS,
    LEAST_SHARE,
    SLOWER,
    UNDECIDED,
    Again,
    Cost,
    chosen,
    fitting_share,
    full_name,
    is_wide,
    run_again,
    verdict,
    with_what_they_need,
)
from benchmarks.tools.two_commits.main import Kept
from benchmarks.tools.two_commits.tasks import TASKS
from benchmarks.tools.two_commits.tree import Tree, TreeError, commit_of, make_environment

from multiring._bench.job import JobCommand, JobError
from multiring._bench.machine import matrix_unit
from multiring._bench.statistics import Interval

JOB = JOBS[0]
CELL = JOB.cells[0]


def interval(low: float, middle: float, high: float, level: float = 0.97) -> Interval:
    return Interval(low, middle, high, level)


@pytest.mark.parametrize(
    ("found", "is_said", "again"),
    [
        (interval(0.97, 1.0, 1.03), HOLDS, False),
        (interval(0.90, 0.93, 0.99), SLOWER, False),
        (interval(0.949, 0.9499, 0.9999), SLOWER, False),
        (interval(0.94, 0.96, 0.99), HOLDS, False),  # slower, but by less than the threshold
        (interval(0.90, 0.94, 1.01), HOLDS, False),  # not surely slower, and a narrow interval
        (interval(0.90, 1.0, 1.10), UNDECIDED, True),
        (interval(0.60, 0.70, 0.80), SLOWER, True),  # wide but clear
        (interval(1.10, 1.50, 1.90), HOLDS, False),  # wide but clear as well
        (interval(0.80, 0.90, 0.97, level=0.9375), UNDECIDED, True),  # five alternations are not enough for a verdict
        (interval(1.0, 1.0, 1.0, level=0.9375), UNDECIDED, False),
    ],
)
def test_verdict(found: Interval, is_said: str, again: bool) -> None:  # noqa: FBT001 -- pytest's
    assert verdict(found) == is_said
    assert is_wide(found) == again


def test_a_share_of_the_time_that_fits_exactly() -> None:
    costs = [Cost(fixed_s=0.5, timed_s=1.0), Cost(fixed_s=0.5, timed_s=3.0)]
    share = fitting_share(costs, starts_s=2.0, turns=10, budget_s=100.0)
    assert share == pytest.approx((100 / 20 - 3) / 4)
    assert 2 * 10 * (2.0 + 1.0 + share * 4.0) == pytest.approx(100.0)


@pytest.mark.parametrize(("budget_s", "share"), [(1e6, 1.0), (10.0, LEAST_SHARE), (-1.0, LEAST_SHARE)])
def test_a_share_is_no_more_than_wanted_and_no_less_than_is_of_use(budget_s: float, share: float) -> None:
    assert fitting_share([Cost(fixed_s=0.5, timed_s=1.0)], starts_s=1.0, turns=10, budget_s=budget_s) == share


def test_no_cells_need_no_share() -> None:
    assert fitting_share([], starts_s=0.0, turns=10, budget_s=1.0) == 1.0


def again(name: str, job: str, middle: float, cost_s: float) -> Again:
    found = interval(middle - 0.1, middle, middle + 0.1)
    return Again(name=name, job=job, found=found, cost_s=cost_s, start_s=1.0)


def test_likely_slower_cells_are_run_again_first_and_share_a_start() -> None:
    wide = [again("x", "one", 1.0, 2.0), again("y", "two", 0.9, 2.0), again("z", "one", 0.95, 2.0)]
    assert run_again(wide, turns=20, budget_s=40 * 8.0) == ["y", "z", "x"]  # the costs are 3 + 3 + 2
    assert run_again(wide, turns=20, budget_s=40 * 7.9) == ["y", "z"]
    assert run_again(wide, turns=20, budget_s=40 * 3.0) == ["y"]
    assert run_again(wide, turns=20, budget_s=-1.0) == []


def test_what_does_not_fit_leaves_room_for_what_does() -> None:
    wide = [again("long", "one", 0.9, 50.0), again("short", "two", 1.0, 1.0)]
    assert run_again(wide, turns=20, budget_s=40 * 10.0) == ["short"]


def test_names_of_cells_are_all_different_and_every_question_can_be_put() -> None:
    names = Counter(full_name(job, cell) for job in JOBS for cell in job.cells)
    assert set(names.values()) == {1}
    for job in JOBS:
        for cell in job.cells:
            assert cell.question(job.ranks).size_bytes == cell.size_bytes


def test_cells_are_chosen_by_whole_parts_of_their_names() -> None:
    (job,) = chosen(["one/all_reduce/arena/64B", "one/all_reduce/ordinary/"])
    assert [cell.name.split("/")[0] for cell in job.cells] == ["arena", *["ordinary"] * 6]
    assert {job.name for job in chosen(["hosts"])} == {job.name for job in JOBS if job.lab}
    with pytest.raises(ValueError, match="begins with hosts/tw;"):
        chosen(["one", "hosts/tw"])


def test_cells_of_what_is_not_installed_are_left_out_and_named() -> None:
    able, left_out = with_what_they_need(JOBS, lambda module: module not in {"chainermn", "tensorflow"})
    assert {job.name for job in JOBS} - {job.name for job in able} == {"tensorflow", "keras", "chainer"}
    assert left_out["chainermn"] == ["chainer/all_reduce/1KiB"]
    assert sorted(left_out["tensorflow"]) == [
        "keras/all_reduce/1KiB",
        "keras/fit/distribute",
        "keras/fit/optimizer",
        "tensorflow/all_reduce/1KiB",
    ]
    assert with_what_they_need(JOBS, lambda _: True) == (list(JOBS), {})


def test_every_cell_is_a_collective_or_a_task() -> None:
    manners = {cell.manner for job in JOBS for cell in job.cells}
    assert manners - {"sync", "async", "burst", "adapter", "named", "grouped"} == set(TASKS)
    assert all(job.adapter for job in JOBS for cell in job.cells if cell.manner in {"adapter", "named", "grouped"})


# ---- stored results ----

HEADING = {"kind": "run", "base": "b", "new": "n"}


def known(*pairs: tuple[float, float], again: tuple[tuple[float, float], ...] = ()) -> two_commits.Known:
    return two_commits.Known(JOB, CELL, pairs=(list(pairs), list(again)))


def test_a_run_goes_on_after_a_line_that_was_cut(tmp_path: Path) -> None:
    path = tmp_path / "kept.jsonl"
    first = Kept(path, HEADING)
    assert first.is_new
    first.add({"kind": "turn", "run": 0, "pairs": {"x": [1.0, 2.0]}, "spent_s": 3.0, "other_cores": 0.5})
    with path.open("a", encoding="utf-8") as file:
        file.write('{"kind": "tu')
    second = Kept(path, HEADING)
    assert not second.is_new
    assert (second.spent_s, second.other_cores) == (3.0, 0.5)
    second.add({"kind": "turn", "spent_s": 1.0, "other_cores": 0.1})
    assert Kept(path, HEADING).spent_s == 4.0


def test_what_was_kept_of_something_else_does_not_count(tmp_path: Path) -> None:
    path, other = tmp_path / "kept.jsonl", {**HEADING, "base": "c"}
    Kept(path, HEADING).add({"spent_s": 3.0})
    begun = Kept(path, other)
    assert begun.is_new
    assert begun.spent_s == 0
    assert json.loads(path.read_text(encoding="utf-8")) == other


def test_cells_that_are_measured_again_are_forgotten_and_others_are_not(tmp_path: Path) -> None:
    path = tmp_path / "kept.jsonl"
    told = Kept(path, HEADING)
    for line in (
        {"kind": "probe", "cell": "x", "spent_s": 1.0},
        {"kind": "out", "cells": ["x", "y"], "spent_s": 1.0},
        {"kind": "calls", "calls": {"x": 5, "y": 6}, "spent_s": 1.0},
        {"kind": "turn", "pairs": {"x": [1.0, 2.0], "y": [1.0, 3.0]}, "spent_s": 1.0},
    ):
        told.add(line)
    begun = Kept(path, HEADING, forget={"x"})
    assert not begun.is_new
    assert begun.spent_s == 0
    assert '"x"' not in path.read_text(encoding="utf-8")
    assert begun.lines[-1]["pairs"] == {"y": [1.0, 3.0]}
    assert begun.lines[-2]["calls"] == {"y": 6}
    assert begun.lines[-3]["cells"] == ["y"]


def test_the_second_run_of_a_cell_counts_alone() -> None:
    cell = known(*[(1.0, 2.0)] * 10, again=((1.0, 1.0),) * 20)
    assert cell.verdict == HOLDS
    assert cell.interval(0).middle == 0.5
    assert two_commits.exit_code([cell], 10) == 0


def test_exit_codes() -> None:
    holds, slower = known(*[(1.0, 1.0)] * 10), known(*[(1.0, 2.0)] * 10)
    assert slower.verdict == SLOWER
    unfinished = known(*[(1.0, 1.0)] * 9)
    wide = [(1.0, 1.0), (1.0, 1.5)] * 5
    broken_off, not_begun, done = (known(*wide, again=((1.0, 1.0),) * times) for times in (3, 0, 20))
    assert two_commits.exit_code([holds], 10) == 0
    assert two_commits.exit_code([holds, slower, unfinished], 10) == 1
    assert two_commits.exit_code([holds, unfinished], 10) == 3
    assert two_commits.exit_code([broken_off], 10) == 3
    assert two_commits.exit_code([not_begun], 10) == 3
    assert two_commits.exit_code([done], 10) == 0
    said = "The minutes were over before 2 of them had all alternations; with more --minutes it goes on."
    assert said in two_commits.summary([broken_off, not_begun, done], 10)


@pytest.mark.parametrize(
    ("sides", "said", "code"),
    [(["new"], "fails", 1), (["base"], "failed before", 0), (["base", "new"], "fails in both", 0)],
)
def test_a_cell_that_fails_counts_where_only_the_new_commit_fails(sides: list[str], said: str, code: int) -> None:
    cell = known()
    cell.failed = dict.fromkeys(sides, "got 1, want 2\nand more")
    assert cell.verdict == said
    assert two_commits.exit_code([cell, known(*[(1.0, 1.0)] * 10)], 10) == code
    assert two_commits.exit_code([cell], 10) == 1
    assert f"- {cell.name} at {sides[0]}: got 1, want 2" in two_commits.summary([cell], 10)
    assert two_commits.table([cell])[-1].endswith(f"| 0 | {said} |")


# ---- jobs ----


def test_a_job_that_ends_is_the_failure_of_the_first_cell_without_all_answers(tmp_path: Path) -> None:
    cells = [two_commits.Known(JOB, cell) for cell in JOB.cells[:3]]
    cases = [two_commits._case(each, "new", tmp_path / str(index)) for index, each in enumerate(cells)]

    def leave(index: int, rank: int, **answer: Any) -> None:
        (tmp_path / str(index) / f"rank-{rank}.json").write_text(json.dumps(answer), encoding="utf-8")

    def failure(*, has_joined: bool = True) -> tuple[list[two_commits.Known], str]:
        error = two_commits._failure(cells, cases, "exit code 1", has_joined=has_joined)
        return error.cells, str(error)

    assert failure(has_joined=False) == (cells, "exit code 1")
    for rank in range(JOB.ranks):
        leave(0, rank, seconds=[1.0])
    leave(1, 0, seconds=[1.0])
    assert failure() == ([cells[1]], "exit code 1")
    leave(1, 1, wrong="got 1, want 2")
    assert failure() == ([cells[1]], "got 1, want 2")


def test_a_commits_python_imports_that_commit_and_the_packages_of_this_one(tmp_path: Path) -> None:
    """This also holds if multiring is installed in place: its import hook precedes PYTHONPATH."""
    tree = Tree("0" * 40, tmp_path)
    package = tree.source / "src" / "multiring"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("", encoding="utf-8")
    make_environment(tree)
    program = "import multiring, numpy; print(multiring.__file__)"
    done = subprocess.run([tree.python, "-c", program], capture_output=True, text=True, check=True)
    assert Path(done.stdout.strip()) == package / "__init__.py"


def test_no_such_commit() -> None:
    with pytest.raises(TreeError, match="'no-such' is no commit of"):
        commit_of("no-such")


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["model name\t: A", "flags\t\t: fpu amx_bf16 amx_tile"], ", AMX"),
        (["model name\t: A", "flags\t\t: fpu avx512f"], ", no AMX"),
        (["Features\t: fp asimd"], ""),
    ],
)
def test_the_processor_is_named_with_its_unit_for_matrices(lines: list[str], said: str) -> None:
    assert matrix_unit(lines) == said


# ---- a run with simulated jobs ----

LEVEL = {"arena/64B": 1e-4, "arena/4KiB": 1e-4, "arena/64KiB": 1e-4}


class Pretended:
    """Simulated jobs of the bench. `seconds_of` returns the duration of calls by cell name, side and job number."""

    def __init__(self, folder: Path, seconds_of: Callable[[str, str, int], float | str]) -> None:
        self.folder = folder
        folder.mkdir()
        self.order: list[str] = []
        self._seconds_of = seconds_of

    def run(self, title: str, start: JobCommand) -> None:
        described = json.loads(Path(start.command[-1]).read_text(encoding="utf-8"))
        number = len(self.order)
        Path(described["joined"]).touch()
        for cell in described["cells"]:
            case = cell["case"]
            name, _, side = case["library"].partition(" at ")
            taken = self._seconds_of(name.removeprefix("one/all_reduce/"), side, number)
            if cell is described["cells"][0]:
                self.order.append(side)
            answer = {"wrong": taken} if isinstance(taken, str) else {"seconds": [taken] * case["calls"]}
            for rank in range(2):
                (Path(case["out_dir"]) / f"rank-{rank}.json").write_text(json.dumps(answer), encoding="utf-8")
            if isinstance(taken, str):
                raise JobError(f"{title}: exit code 1")


def run_pretended(
    folder: Path, seconds_of: Callable[[str, str, int], float | str], minutes: float = 1000.0
) -> tuple[list[two_commits.Known], Pretended]:
    (job,) = chosen([f"one/all_reduce/{name}" for name in LEVEL])
    cells = [two_commits.Known(job, cell) for cell in job.cells]
    jobs: Any = Pretended(folder / f"jobs-{len(list(folder.iterdir()))}", seconds_of)
    trees = {side: Tree(side * 20, folder) for side in two_commits.SIDES}
    now = time.monotonic()
    kept = Kept(folder / "kept.jsonl", HEADING)
    two_commits.Run(jobs, trees, kept, cells, until=now + 60 * minutes).measure(10, now)
    return cells, jobs


def test_commits_take_turns_and_cells_are_judged(tmp_path: Path) -> None:
    def seconds_of(name: str, side: str, number: int) -> float:
        slower = 1.25 if name == "arena/4KiB" and side == "new" else 1.0
        # Fast and slow are equally likely in the first run only: the interval is wide at first, and then narrow.
        noise = 1.5 if name == "arena/64KiB" and number < 22 and (number // 2 + (side == "new")) % 2 else 1.0
        return LEVEL[name] * slower * noise

    cells, jobs = run_pretended(tmp_path, seconds_of)
    assert [cell.verdict for cell in cells] == [HOLDS, SLOWER, HOLDS]
    assert [len(cell.pairs[0]) for cell in cells] == [10, 10, 10]
    assert [len(cell.pairs[1]) for cell in cells] == [0, 0, 20]
    assert jobs.order == ["base", "new", *["base", "new", "new", "base"] * 15]
    assert two_commits.exit_code(cells, 10) == 1
    again, more = run_pretended(tmp_path, seconds_of)  # all results are stored
    assert more.order == []
    assert [cell.pairs for cell in again] == [cell.pairs for cell in cells]


def test_what_stays_wide_is_undecided(tmp_path: Path) -> None:
    def seconds_of(name: str, side: str, number: int) -> float:
        return LEVEL[name] * (1.5 if (number // 2 + (side == "new")) % 2 else 1.0)

    cells, _ = run_pretended(tmp_path, seconds_of)
    assert [cell.verdict for cell in cells] == [UNDECIDED] * 3
    assert [len(cell.counted) for cell in cells] == [20] * 3
    assert two_commits.exit_code(cells, 10) == 0


def test_a_wrong_cell_is_left_out_and_the_others_go_on(tmp_path: Path) -> None:
    """This includes a cell that becomes wrong later, during the alternations."""

    def seconds_of(name: str, side: str, number: int) -> float | str:
        if (name, side) == ("arena/64B", "base") or (name == "arena/4KiB" and side == "new" and number > 9):
            return "got 1, want 2"
        return LEVEL[name]

    cells, _ = run_pretended(tmp_path, seconds_of)
    assert [cell.verdict for cell in cells] == ["failed before", "fails", HOLDS]
    assert cells[1].failed == {"new": "got 1, want 2"}
    assert len(cells[2].pairs[0]) == 10
    assert two_commits.exit_code(cells, 10) == 1


def test_without_time_nothing_is_decided_and_that_is_said(tmp_path: Path) -> None:
    cells, jobs = run_pretended(tmp_path, lambda name, _side, _number: LEVEL[name], minutes=0.0)
    assert jobs.order == []
    assert [cell.verdict for cell in cells] == [UNDECIDED] * 3
    assert two_commits.exit_code(cells, 10) == 3
