"""Studies of `multiring.trials.run` whose ranks are killed at random moments, first the one that holds the study."""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.evidence.support.claims import Claim

RANK = Path(__file__).resolve().with_name("rank.py")
RANKS, TRIALS = 5, 60
_MOST_S = 300.0  # how long a study may take


def moves(count: int, load: Callable[[], str]) -> Iterator[Claim]:
    """Kill ranks of studies that move."""
    kills, holders, trials, wrong, slowest_s = 0, 0, 0, [], 0.0
    for seed in range(count):
        with tempfile.TemporaryDirectory() as name:
            folder, began_s = Path(name), time.monotonic()
            killed = run_and_kill(folder, random.Random(seed), seed)  # noqa: S311 -- no secret
            slowest_s = max(slowest_s, time.monotonic() - began_s)
            kills, holders = kills + len(killed), holders + (killed[:1] == [0])
            found = [json.loads(path.read_text()) for path in sorted(folder.glob("result-*.json"))]
            trials += len(found[0]["trials"]) if found else 0
            faults = [f"seed {seed}, killed {killed}: {each}" for each in faults_in(folder, killed, found)]
            print(f"seed {seed}: killed {killed}, {len(faults)} wrong", *faults, sep="\n", file=sys.stderr)
            wrong += faults
    yield Claim(
        text=f"{count} studies of {TRIALS} trials on 1 or 2 of {RANKS} ranks; one or two ranks are killed at random "
        "moments, first the one that holds the study: one trial of each loses its last report, nothing else is lost or "
        "wrong, and the ranks that are left go on as one job",
        figure=f"{trials} trials, {kills} ranks killed, {holders} of them as they held the study, {len(wrong)} wrong"
        f"{': ' + wrong[0] if wrong else ''}; the slowest study took {slowest_s:.0f} s; {load()}",
        holds=not wrong,
    )


def run_and_kill(folder: Path, chance: random.Random, seed: int) -> list[int]:
    """Run a study, and kill ranks of it; return which, in order."""
    words = [sys.executable, "-m", "multiring", "run", "-n", str(RANKS), "--min-ranks", "1", str(RANK)]
    victims = [0, *chance.sample(range(1, RANKS), chance.randrange(2))]
    killed: list[int] = []
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(  # noqa: S603 -- our own program
            [*words, "moves", "-", json.dumps([TRIALS, seed])], cwd=folder, stdout=log, stderr=log
        )
        until_s = time.monotonic() + _MOST_S
        while not any(path.stat().st_size for path in folder.glob("reported-*")) and process.poll() is None:
            time.sleep(0.01)
        for rank in victims:
            time.sleep(chance.random() * 0.6)
            lines = [line.split() for line in (folder / "pids").read_text().splitlines()]
            pids = {int(each): int(pid) for each, pid in lines}
            if process.poll() is None and not list(folder.glob("result-*.json")):
                os.kill(pids[rank], signal.SIGKILL)
                killed.append(rank)
        try:
            process.wait(max(1.0, until_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    return killed


def faults_in(folder: Path, killed: Sequence[int], found: Sequence[Any]) -> Iterator[str]:
    """Yield what is wrong with the results of a study whose ranks were killed."""
    left = RANKS - len(killed)
    if len(found) != left or any(each["size"] != left or each["total"] != left for each in found):
        yield f"{len(found)} results of {left} ranks that are left: {(folder / 'log').read_text()[-3000:]}"
        return
    trials, kept = found[0]["trials"], states_in(folder)
    if any(each["trials"] != trials for each in found):
        yield "the ranks have different results"
    if found[0]["unsaved"] or len(kept) != len(trials):
        yield f"{found[0]['unsaved']} trials are not in the storage, which has {len(kept)} of {len(trials)}"
    said = {}  # by trial, how many reports its first rank had made
    for path in folder.glob("reported-*"):
        for line in path.read_text().splitlines():
            said[int(line.split()[0])] = int(line.split()[1]) + 1
    for each, copy in zip(trials, kept, strict=False):
        reports = {int(step): value for step, value in each["reports"].items()}
        if copy.params != each["params"] or copy.intermediate_values != reports:
            yield f"trial {each['number']}: the storage has {copy.params} {copy.intermediate_values}, the result {each}"
        if fault := fault_of(each, reports, set(killed), said.get(each["number"], 0)):
            yield f"trial {each['number']}: {fault}: {each}"
    interrupted = sum(each["reason"].startswith("interrupted") for each in trials)
    failed = sum(each["state"] == "failed" for each in trials) - interrupted
    if len(trials) - interrupted != TRIALS or max(interrupted, failed) > len(killed):
        yield f"{len(trials)} trials, {interrupted} interrupted, {failed} failed"


def fault_of(trial: Any, reports: dict[int, float], killed: set[int], said: int) -> str:
    """Return what is wrong with a trial, or an empty text."""
    if reports != {step: trial["params"]["x"] + step for step in range(len(reports))}:
        return "wrong reports"
    if trial["state"] == "complete":
        return "" if trial["value"] == trial["params"]["x"] and len(reports) == 6 else "wrong value"
    if trial["state"] == "pruned" or trial["reason"].startswith("interrupted"):
        return "" if len(reports) == said else f"{said} reports were made"
    if not killed & set(trial["ranks"]) or "was lost" not in trial["reason"]:
        return "it failed without a lost rank"
    return "" if len(reports) >= said - 1 else f"{said} reports were made"


def lives(pid: int) -> bool:
    """Return whether a process runs."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def states_in(folder: Path) -> list[Any]:
    """Return the trials in the storage of a study."""
    import optuna  # noqa: PLC0415 -- the other claims do not need it here

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return list(optuna.load_study(study_name="study", storage=f"sqlite:///{folder}/study.db").trials)
