"""Studies of ranks that go on without lost ones: `multiring.trials.run` in a job of `multiring run --min-ranks`.

Ranks kill themselves at a report. Before that, the program notes what each trial has reported.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import optuna
import pytest

PROGRAM = """
import json, os, signal, sys, time
from pathlib import Path
import numpy as np
import optuna
import multiring
from multiring import adapters, trials
from multiring.errors import MultiringError

deaths, arguments = json.loads(sys.argv[1]), json.loads(sys.argv[2])
multiring.init()
born, reports = multiring.rank(), [0]
log = open(f"reported-{born}", "w", buffering=1)


def objective(trial):
    for step in range(5):
        time.sleep(0.01)
        if multiring.size() > 1:
            assert adapters.allreduce(np.full(9, float(trial.number)), name="gradient")[0] == trial.number
        trial.report(trial.params["x"] + step, step)
        reports[0] += 1
        if trial.group.rank == 0:
            log.write(f"{trial.number} {step}\\n")
        if deaths.get(str(born)) == reports[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        if trial.should_prune():
            raise trials.TrialPruned
    return trial.params["x"]


sampler = optuna.samplers.TPESampler(seed=3, n_startup_trials=4)
pruner = optuna.pruners.MedianPruner(n_startup_trials=6, n_warmup_steps=2)
space = {"x": {"low": 0.0, "high": 1.0}, "ranks": [1, 2]}
try:
    found = trials.run(objective, space, sampler=sampler, pruner=pruner, **arguments)
except MultiringError as error:
    print("ERROR", json.dumps([born, f"{type(error).__name__}: {error}"]), flush=True)
    raise SystemExit(3)
facts = [
    [each.number, each.params, each.state, each.value, each.reason, each.ranks, each.reports] for each in found.trials
]
total = float(np.asarray(adapters.allreduce(np.ones(1), name="after", op="sum"))[0])
again = trials.run(lambda trial: float(multiring.size()), {"x": [1, 2]}, trials=3, ranks_per_trial=multiring.size())
print("END", json.dumps([born, multiring.rank(), total, found.unsaved, again.best.value, facts]), flush=True)
"""


def run(folder: Path, deaths: dict[str, int], *, ranks: int, least: int = 1, **arguments: Any) -> Any:
    (folder / "program.py").write_text(PROGRAM)
    words = [sys.executable, "-m", "multiring", "run", "-n", str(ranks), "--min-ranks", str(least), "program.py"]
    return subprocess.run(
        [*words, json.dumps(deaths), json.dumps(arguments)],
        capture_output=True, text=True, check=False, timeout=250, cwd=folder,
    )  # fmt: skip


def marked(text: str, mark: str) -> list[Any]:
    return sorted(json.loads(line.partition(f"{mark} ")[2]) for line in text.splitlines() if f"{mark} " in line)


def said_in(folder: Path) -> dict[int, int]:
    """Return how many reports the first rank of each trial has made, by trial."""
    lines = [line for path in folder.glob("reported-*") for line in path.read_text().splitlines()]
    return {int(line.split()[0]): int(line.split()[1]) + 1 for line in lines}


# By rank, at which of its reports it dies. Rank 0 holds the study, then rank 1, then rank 2.
DEATHS: dict[str, dict[str, int]] = {
    "the rank that holds the study, and the next one": {"0": 12, "1": 17},
    "one that could hold it, and one that could not": {"2": 9, "3": 8},
}


@pytest.mark.parametrize("case", DEATHS)
def test_one_trial_loses_its_last_report_and_nothing_else(tmp_path: Path, case: str) -> None:
    deaths = DEATHS[case]
    storage = str(tmp_path / "study.db")
    done = run(tmp_path, deaths, ranks=4, trials=30, ranks_per_trial="ranks", storage=storage)
    assert done.returncode == 0, done.stderr
    ends = marked(done.stdout, "END")
    left = [rank for rank in range(4) if str(rank) not in deaths]
    assert [end[:5] for end in ends] == [[born, rank, len(left), 0, len(left)] for rank, born in enumerate(left)]
    facts = ends[0][5]
    assert all(end[5] == facts for end in ends)
    kept = optuna.load_study(study_name="study", storage=f"sqlite:///{storage}").trials
    said, failed = said_in(tmp_path), []
    assert [each.params for each in kept] == [params for _, params, *_ in facts]
    assert [number for number, *_ in facts] == list(range(30))
    for (number, params, state, value, reason, ranks, reports), copy in zip(facts, kept, strict=True):
        assert {int(step): one for step, one in reports.items()} == copy.intermediate_values
        assert reports == {str(step): params["x"] + step for step in range(len(reports))}, number
        assert copy.state.name == {"complete": "COMPLETE", "pruned": "PRUNED", "failed": "FAIL"}[state]
        if state == "failed":
            failed.append(number)
            lost = [f"rank {rank} was lost: " for rank in ranks if str(rank) in deaths]  # the trial may have had both
            assert reason.startswith(tuple(lost)), (number, reason)
            assert said[number] - 1 <= len(reports)
        else:
            assert said[number] == len(reports)
            assert state == "pruned" or (value, len(reports)) == (params["x"], 5)
    assert 1 <= len(failed) <= len(deaths)
    assert ("holds the study now" in done.stderr) == ("0" in deaths)


def test_the_study_ends_if_too_few_ranks_are_left(tmp_path: Path) -> None:
    done = run(tmp_path, {"0": 3}, ranks=2, least=2, trials=50, ranks_per_trial=1)
    assert done.returncode == 75, done.stderr
    [[born, text]] = marked(done.stdout, "ERROR")
    assert born == 1
    assert text.startswith("StateError: trials: ")
    assert "--min-ranks 2" in text


def test_trials_that_want_more_ranks_than_are_left(tmp_path: Path) -> None:
    done = run(tmp_path, {"0": 4}, ranks=2, trials=50, ranks_per_trial=2)
    [[born, text]] = marked(done.stdout, "ERROR")
    assert (born, text) == (
        1, "StateError: trials: the study cannot go on: StateError: 1 rank is left, and ranks_per_trial=2"
    )  # fmt: skip
