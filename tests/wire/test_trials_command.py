"""`multiring trials run`: states and reasons, the parameters of Optuna alone, prunes, signals, deaths, and judging."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import optuna
import pytest

WAIT_S = 300.0
SCRIPT = """
import argparse, math, os, signal, sys, time
from pathlib import Path

words = argparse.ArgumentParser()
for name, kind, value in (("rate", float, 0.0), ("how", str, "good"), ("seed", int, 0), ("test", str, "")):
    words.add_argument(f"--{name}", type=kind, default=value)
given = words.parse_args()
rank, size, how = int(os.environ["MULTIRING_RANK"]), int(os.environ["MULTIRING_SIZE"]), given.how
is_last = rank == size - 1
with open("pids", "a") as file:
    file.write(f"{os.getpid()}\\n")
if how == "raise" and is_last:
    raise ValueError("no such optimizer")
if how == "memory" and is_last:
    raise MemoryError("no room")
if how == "exit":
    sys.exit(3)
loss = math.nan if how == "nan" else (given.rate - 0.3) ** 2
for step in range(4 if how != "silent" else 0):
    while how == "killed" and is_last:
        if Path("reported").exists():  # by rank 0
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.05)
    print(f"epoch {step}: loss {loss + rank + 1 / (1 + step)!r}")
    if how == "twice":
        print(f"epoch {step}: loss 7")
if how == "good":
    print("~" * 200_000)
if how == "killed":
    Path("reported").touch()
    time.sleep(1000)
while how == "sleep" or (how == "waits" and not Path("go").exists()):
    time.sleep(0.05)
if given.test:
    print(f"{given.test} loss {loss + given.seed}")
"""


def write(folder: Path, table: str) -> None:
    (folder / "train.py").write_text(SCRIPT)
    (folder / "study.toml").write_text(table)


def start(folder: Path) -> "subprocess.Popen[str]":
    words = [sys.executable, "-m", "multiring", "trials", "run", "study.toml", "--", sys.executable, "train.py"]
    return subprocess.Popen(words, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def run(folder: Path) -> tuple[int, str]:
    process = start(folder)
    text, _ = process.communicate(timeout=WAIT_S)
    assert not alive(folder)
    return process.returncode, text


def alive(folder: Path) -> list[int]:
    return [int(each) for each in (folder / "pids").read_text().split() if is_alive(int(each))]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def kept(folder: Path, name: str = "study") -> list[Any]:
    return list(optuna.load_study(study_name=name, storage=f"sqlite:///{folder}/study.db").trials)


REASONS = {
    "raise": "rank 1: exit code 1: ValueError: no such optimizer",
    "memory": "out of memory: rank 1: exit code 1: MemoryError: no room",
    "exit": r"rank [01]: exit code 3",
    "nan": "its value is NaN",
    "silent": "it never reported: its rank 0 made no call of multiring.trials.report",
    "killed": "out of memory, or killed by a user: rank 1: killed by SIGKILL; the system kills with SIGKILL",
    "twice": "it reported step 0 twice: 1.04, then 7.0",
}
KINDS = f"""
trials = {len(REASONS) + 1}
ranks = 4
ranks_per_trial = 2
words = ["--rate", "{{rate}}", "--how={{how}}"]
report = "epoch {{step}}: loss {{value}}"
storage = "study.db"
log_dir = "logs"
space.rate = [0.5]
space.how = {json.dumps(["good", *REASONS])}
sampler = {{kind = "GridSampler", seed = 1}}

[judge]
seeds = [1, 2, 3]
words = ["--seed", "{{seed}}", "--test", "test"]
result = "test loss {{value}}"
"""


def test_ends_are_states_with_reasons_and_the_best_is_judged_once(tmp_path: Path) -> None:
    write(tmp_path, KINDS)
    code, text = run(tmp_path)
    assert code == 0, text
    trials = {each.params["how"]: each for each in kept(tmp_path)}
    assert trials["good"].state.name == "COMPLETE", text
    assert trials["good"].value == pytest.approx(0.29)
    assert trials["good"].intermediate_values[0] == pytest.approx(1.04)  # of rank 0, not of rank 1
    for how, reason in REASONS.items():
        assert trials[how].state.name == "FAIL", text
        assert re.match(reason, trials[how].user_attrs["multiring:reason"]), trials[how]
    assert len(trials["killed"].intermediate_values) == 4  # what it had reported stays
    assert "multiring run -n 2 -- " in text
    assert "train.py --rate 0.5 --how=good" in text
    both = "found in the study: 0.29; trained again and judged: mean 2.04 (seed 1: 1.04; seed 2: 2.04; seed 3: 3.04)"
    assert both in text
    log = (tmp_path / f"logs/trial-{trials['good'].number}.log").read_text()
    assert "epoch 3: loss" in log
    assert log.count("~") == 2 * 200_000  # all of a line that is cut
    started = len((tmp_path / "pids").read_text().split())
    code, text = run(tmp_path)  # all is there: nothing is run again
    assert code == 0
    assert both.replace("judged:", "judged, by an earlier run of this command:") in text
    assert "earlier trials" not in text
    assert len((tmp_path / "pids").read_text().split()) == started
    # Figures of other lines are other figures.
    table = KINDS.replace('result = "test loss', 'result = "epoch 0: loss').replace("{step}: loss", "{step}:  loss")
    (tmp_path / "study.toml").write_text(table)
    code, text = run(tmp_path)
    assert code == 0
    assert "trained again and judged: mean 1.04 (seed 1: 1.04; seed 2: 1.04; seed 3: 1.04)" in text
    assert "earlier trials of the study 'study' reported by other lines: ['epoch {step}: loss {value}', '']" in text
    assert "now ['epoch {step}:  loss {value}', '']" in text


def test_parameters_and_prunes_are_those_of_optuna_alone(tmp_path: Path) -> None:
    write(
        tmp_path,
        """
trials = 9
words = ["--rate", "{rate}", "--how", "{how}"]
report = "epoch {step}: loss {value}"
storage = "study.db"
ranks = 1
space = {rate = {low = 0.0, high = 1.0}, how = ["good", "also"]}
sampler = {kind = "TPESampler", seed = 11, n_startup_trials = 4}
pruner = {kind = "MedianPruner", n_startup_trials = 2}
""",
    )
    code, text = run(tmp_path)
    assert code == 0, text
    assert "not judged: the best of many trials looks better than it is" in text
    alone = optuna.create_study(
        sampler=optuna.samplers.TPESampler(seed=11, n_startup_trials=4),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=2),
    )
    for _ in range(9):
        trial = alone.ask(
            {
                "rate": optuna.distributions.FloatDistribution(0.0, 1.0),
                "how": optuna.distributions.CategoricalDistribution(["good", "also"]),
            }
        )
        loss = (trial.params["rate"] - 0.3) ** 2
        for step in range(4):
            trial.report(loss + 1 / (1 + step), step)
            if trial.should_prune():
                alone.tell(trial, state=optuna.trial.TrialState.PRUNED)
                break
        else:
            alone.tell(trial, loss + 0.25)
    trials = kept(tmp_path)
    assert [each.params for each in trials] == [each.params for each in alone.trials]
    assert [each.state for each in trials] == [each.state for each in alone.trials]
    # The script reports on until it is stopped; what comes after the prune does not count.
    assert [each.intermediate_values for each in trials] == [each.intermediate_values for each in alone.trials]
    assert {each.state.name for each in trials} == {"COMPLETE", "PRUNED"}


LONG = """
trials = 3
words = ["--rate", "{rate}", "--how", "waits"]
report = "epoch {step}: loss {value}"
storage = "STORAGE"
ranks = 1
grace_s = 30
space.rate = {low = 0.0, high = 1.0}
sampler = {kind = "RandomSampler", seed = 3}
"""


@pytest.mark.parametrize(
    ("number", "storage"),
    [(signal.SIGINT, "study.db"), (signal.SIGTERM, "study.log"), (signal.SIGKILL, "study.db")],
)
def test_a_study_that_was_ended_goes_on(tmp_path: Path, number: signal.Signals, storage: str) -> None:
    write(tmp_path, LONG.replace("STORAGE", storage))
    process = start(tmp_path)
    wait_until(lambda: (tmp_path / "pids").exists() and alive(tmp_path))
    process.send_signal(number)
    text, _ = process.communicate(timeout=WAIT_S)
    wait_until(lambda: not alive(tmp_path))
    assert process.returncode == (128 + number if number != signal.SIGKILL else -number), text
    (tmp_path / "go").touch()
    code, text = run(tmp_path)
    assert code == 0, text
    assert "study 'study': 4 trials: 3 complete, 0 pruned, 1 failed" in text
    if storage == "study.db":
        trials = kept(tmp_path)
        assert trials[0].user_attrs["multiring:reason"].startswith("interrupted: its job ended first")
        assert trials[1].params == trials[0].params


def test_a_time_limit(tmp_path: Path) -> None:
    write(
        tmp_path,
        'trials = 1\nranks = 1\ntime_limit_s = 1\nwords = ["{how}"]\nspace.how = ["--how=sleep"]\nstorage = "study.db"',
    )
    (tmp_path / "pids").touch()
    code, text = run(tmp_path)
    assert code == 1, text
    assert kept(tmp_path)[0].user_attrs["multiring:reason"] == "its time limit of 1 s has passed"
    assert "no trial is complete; trial 0: its time limit of 1 s has passed" in text


def wait_until(holds: Any) -> None:
    until_s = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < until_s
        time.sleep(0.05)


def test_a_wrong_study_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "trials = 0\nspace.rate = [1]\n")
    environment = {**os.environ, "COLUMNS": "200"}
    for words, code, told in (
        (["study.toml", "--", "python", "train.py"], 2, "study.toml, line 1: trials: 0: want the number of trials"),
        (["study.toml"], 2, "no program: want multiring trials run study.toml -- python train.py"),
        (["study.toml", "-n", "2", "--", "true"], 2, "-n: want options before study.toml"),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "multiring", "trials", "run", *words],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=WAIT_S,
            check=False,
        )
        assert (done.returncode, done.stdout) == (code, ""), done
        assert told in done.stderr
        assert "Traceback" not in done.stderr
