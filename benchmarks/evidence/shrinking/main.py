"""Kill and freeze random ranks of jobs that go on without lost ranks.

    python benchmarks/evidence/shrinking/main.py [--seconds 1800] [--seed 0] [--results FILE]

Each job has 2 to 6 ranks on this host, which train with NumPy, or in a third of the jobs with torch. Ranks are killed,
one or two at once, until one is left; at most one rank of a job is frozen, and goes on later. The job must end well.
Its weights must equal, to 1e-10, those of the same steps in one process, with as many ranks at each step. No committed
step may be lost. A rank that is killed when others have done the last step may fail the job. The times count kills
before a rank is frozen. The results file has a line for each job; a further run goes on with the next seed.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[3]))  # lets this script import from the repository root

from benchmarks.evidence.support.claims import commit, machine

from multiring._settings import inherited_environment

RANK = Path(__file__).with_name("rank.py")
STEPS, PAUSE_S, DEADLINE_S = 60, 0.02, 180.0
KILLED, MOMENT_S = 137, 0.5
PAUSES_S = (0.0, 0.001, 0.02, 0.3, 0.6, 1.0)


def main() -> int:
    """Run jobs, and print a table; return 1 if a job was wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    done = results_of_jobs(parser, Path("build/shrinking.jsonl"), lambda _, *words: job(*words))
    times = sorted(each for row in done for each in row["next_step_s"])
    print(
        f"# Ranks lost, {time.strftime('%Y-%m-%d %H:%M')}\n\n`{' '.join(sys.argv)}` at commit {commit()}, {machine()}\n"
    )
    print(
        "| jobs | wrong | killed | frozen | steps lost | next step, median | longest | load |\n"
        "|---|---|---|---|---|---|---|---|"
    )
    counts = [sum(row[name] for row in done) for name in ("killed", "frozen", "lost")]
    wrong = sum(bool(row["faults"]) for row in done)
    told = [f"{times[len(times) // 2]:.2f} s", f"{times[-1]:.2f} s"] if times else ["-", "-"]
    print("|", " | ".join(map(str, [len(done), wrong, *counts, *told, f"{os.getloadavg()[0]:.0f}"])), "|")
    return 1 if wrong else 0


def results_of_jobs(
    parser: argparse.ArgumentParser, results: Path, job: Callable[[argparse.Namespace, int, str, str], dict[str, Any]]
) -> list[dict[str, Any]]:
    """Run jobs for as long as the command line says; return the results of all, also of earlier runs.

    Args:
        parser: of the command line, with the program's own options.
        results: the default of the file with a line for each job.
        job: runs a job by the options, its seed, the engine and the kind of the program.
    """
    parser.add_argument("--seconds", type=float, default=1800.0, help="time for new jobs")
    parser.add_argument("--seed", type=int, default=0, help="the seed of the first job")
    parser.add_argument("--results", type=Path, default=results, help="file with a line a job")
    arguments = parser.parse_args()
    arguments.results.parent.mkdir(parents=True, exist_ok=True)
    text = arguments.results.read_text() if arguments.results.exists() else ""
    done = [json.loads(line) for line in text.splitlines()]
    until_s = time.monotonic() + arguments.seconds
    while time.monotonic() < until_s:
        seed = arguments.seed + len(done)
        engine, kind = ("auto", "tcp")[len(done) % 2], ("numpy", "torch", "numpy")[len(done) % 3]
        done.append({"seed": seed, "engine": engine, "kind": kind, **job(arguments, seed, engine, kind)})
        with arguments.results.open("a") as file:
            file.write(json.dumps(done[-1]) + "\n")
        if done[-1]["faults"]:
            print(done[-1], flush=True)
    return done


Acts = TypeVar("Acts")


def run_job(
    folder: Path,
    words: Sequence[str],
    variables: Mapping[str, str],
    act: Callable[[subprocess.Popen[bytes]], Acts],
    deadline_s: float,
) -> tuple[Acts, int] | None:
    """Run a job and act on it meanwhile; return what `act` returned, and the exit code. None: the job hangs.

    Args:
        folder: the job's output is written to the file `output` in it.
        words: what follows `multiring run`.
        variables: of the environment, beside those that are inherited.
        act: called with the launcher's process once it has started.
        deadline_s: how long the job may go on after `act`.
    """
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(  # noqa: S603 -- our own program
            [sys.executable, "-m", "multiring", "run", *words],
            env={**inherited_environment(), **variables},
            stdout=output,
            stderr=output,
        )
        try:
            return act(process), process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait(deadline_s)
            return None


def end_of_output(folder: Path) -> str:
    """Return the last lines that a job has printed."""
    return (folder / "output").read_text()[-6000:]


def job(seed: int, engine: str, kind: str) -> dict[str, Any]:
    """Run a job; return what was done to it, and what was wrong."""
    random = Random(seed)  # noqa: S311 -- no secret
    size = random.randint(2, 6)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        stall_s = "4" if kind == "numpy" else "30"  # ranks that import torch set their optimizers up at different times
        variables = {"MULTIRING_ENGINE": engine, "MULTIRING_STALL_TIMEOUT_S": stall_s, "MULTIRING_STALL_WARN_S": "2"}
        words = ["-n", str(size), "--min-ranks", "1", str(RANK), name, str(STEPS), str(PAUSE_S), kind]
        ended = run_job(folder, words, variables, lambda process: disturb(process, folder, size, random), DEADLINE_S)
        if ended is None:
            return {"faults": ["it hangs", end_of_output(folder)], **counted([], [], size)}
        acts, code = ended
        lines = [line.split() for line in (folder / "log").read_text().splitlines()]
        faults = faults_in(folder, size, 0 if code == KILLED and is_late(lines, acts[-1][0], STEPS) else code)
        if faults:
            faults.append(end_of_output(folder))
        return {"faults": faults, **counted(acts, lines, size)}


def disturb(process: subprocess.Popen[bytes], folder: Path, size: int, random: Random) -> list[tuple[float, int, str]]:
    """Kill and freeze ranks until one is left; return when, whom and how."""
    files = [folder / f"in-{rank}" for rank in range(size)]
    until_s = time.monotonic() + DEADLINE_S
    while not all(file.exists() for file in files):
        if process.poll() is not None or time.monotonic() > until_s:
            return []
        time.sleep(0.01)
    pids = [int((folder / f"pid-{rank}").read_text()) for rank in range(size)]
    alive, acts, thaw = list(range(size)), [], (0, 0.0)
    while len(alive) > 1 and process.poll() is None:
        time.sleep(random.choice(PAUSES_S))
        for rank in random.sample(alive, min(random.choice((1, 1, 1, 2)), len(alive) - 1)):
            freezes = random.random() < 0.2 and len(alive) > 2 and not thaw[1]
            number = signal.SIGSTOP if freezes else signal.SIGKILL
            if freezes:
                thaw = rank, time.monotonic() + random.choice((0.5, 3.0, 8.0, 20.0))
            if send(pids[rank], number):
                acts.append((time.time(), rank, number.name))
            alive.remove(rank)
    if thaw[1]:
        time.sleep(max(0.0, thaw[1] - time.monotonic()))
        send(pids[thaw[0]], signal.SIGCONT)
    return acts


def is_late(lines: Sequence[Sequence[str]], at: float, steps: int) -> bool:
    """Return whether a kill at the time `at` may have come when a rank had done the last step."""
    return any(
        float(when) < at + MOMENT_S and int(step) == steps for when, _, kind, step, _ in lines if kind == "commit"
    )


def send(pid: int, number: signal.Signals) -> bool:
    """Send a signal; return whether the process was there."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def faults_in(folder: Path, size: int, code: int) -> list[str]:
    """Return what is wrong with the job's ends."""
    ends = [json.loads(file.read_text()) for rank in range(size) if (file := folder / f"end-{rank}").exists()]
    faults = [] if code == 0 else [f"exit code {code}"]
    if not ends:
        faults.append("no rank came to the end")
    for sizes, weights in ends:
        if sizes != ends[0][0] or len(sizes) != STEPS or sizes != sorted(sizes, reverse=True):
            faults.append(f"numbers of ranks {sizes}")
        elif np.abs(np.array(weights) - trained(sizes)).max() > 1e-10:
            faults.append(f"weights {weights}")
    return faults


def trained(sizes: Sequence[int]) -> np.ndarray[Any, Any]:
    """Return the weights after steps of so many ranks, computed in this process."""
    samples = np.random.default_rng(0).standard_normal((4096, 20))
    wanted, weights = samples @ np.arange(20.0), np.zeros(20)
    for step, size in enumerate(sizes):
        at = [(step * 8 + rank) % 4096 for rank in range(size)]
        weights = weights - 0.01 * ((samples[at] @ weights - wanted[at]) @ samples[at]) / size
    return weights


def counted(acts: Sequence[tuple[float, int, str]], lines: Sequence[list[str]], size: int) -> dict[str, Any]:
    """Return the numbers of kills, freezes and lost steps, and the times from a kill to the next step."""
    commits = [(float(at), int(step), int(ranks)) for at, _, kind, step, ranks in lines if kind == "commit"]
    begins = [(float(at), int(step)) for at, _, kind, step, _ in lines if kind == "begin"]
    lost = [max((done for when, done, _ in commits if when < at), default=0) - step for at, step in begins]
    times = []
    for number, (at, _, how) in enumerate(acts):
        if how == "SIGSTOP":
            break
        after = min((when for when, _, ranks in commits if when > at and ranks < size - number), default=None)
        until = acts[number + 1][0] if number + 1 < len(acts) else float("inf")
        if after is not None and after <= until:
            times.append(after - at)
    kinds = [how for _, _, how in acts]
    return {
        "killed": kinds.count("SIGKILL"),
        "frozen": kinds.count("SIGSTOP"),
        "lost": max([0, *lost]),
        "next_step_s": times,
    }


if __name__ == "__main__":
    sys.exit(main())
