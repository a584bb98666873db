"""The cases of `user_script.py --only input`: predicted rates of input against those that are measured.

A rate is predicted from one worker of one rank (`multiring data bench --workers 1 --save`), alone or beside the worker
of another rank, and measured by `multiring data bench` with more workers and on two ranks at once. A step is predicted
from the profile of a script on one rank that reads the data, and measured on two ranks.
"""

import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.promises.data_throughput import made

TRAIN = Path(__file__).with_name("train_fed.py")
# Each kind of data with the case of data_throughput.py that makes it, its folder and its format.
KINDS = {
    "pictures": ("jpeg", "files", "imagefolder"),
    "packed pictures": ("jpeg", "pack", "pack"),
    "arrays": ("raw", "files", "npy-files"),
    "packed arrays": ("raw", "pack", "pack"),
    "packed records": ("small", "pack", "pack"),
}
SAMPLES = {"jpeg": 1000, "raw": 1000, "small": 20_000}
# How the worker was measured: the ranks of the job that measured it, each with one worker.
SOURCES = {"alone": 1, "beside another": 2}
CASES = ((1, 2), (2, 1), (2, 2))  # ranks, and workers of each
BATCH, STEPS = 32, 60
# Milliseconds of a step that its computation sleeps: in the shorter one, the rank waits for its samples.
SLEEPS = (0, 150)
HOST = '[[hosts]]\nname = "here"\nslots = 2\n'
WITHIN = 0.1

Command = Callable[..., str]  # runs a command of multiring, and returns what it prints


def input_records(
    folder: Path, multiring: Command, seconds: float, done: set[tuple[str, str]]
) -> Iterator[dict[str, Any]]:
    """Yield the record of each case that is not `done`.

    Args:
        folder: where data sets and measurements are kept.
        multiring: runs a command of multiring.
        seconds: the duration of each measurement of `data bench`.
        done: the data and the case of the records that exist.
    """
    (folder / "host.toml").write_text(HOST, encoding="utf-8")
    for kind, (case, part, form) in KINDS.items():
        place = folder / case
        if not (place / "pack").exists():
            made(case, place, SAMPLES[case])
        data = (str(place / part), "--format", form)
        for ranks, workers in CASES:
            names = {beside: f"{ranks} x {workers}, from a worker {beside}" for beside in SOURCES}
            todo = {SOURCES[beside]: name for beside, name in names.items() if (kind, name) not in done}
            if todo:
                for found in _rates(folder, multiring, data, (ranks, workers), todo, seconds):
                    yield {"data": kind, **found}
        if part == "files" or case == "small":
            continue
        for sleep_ms in SLEEPS:
            name = f"step of 2 x 1, {sleep_ms} ms of compute"
            if (kind, name) in done:
                continue
            load = os.getloadavg()[0]
            told = _step(folder, multiring, (str(place / part), form), sleep_ms)
            yield {"data": kind, "case": name, "load": load, "unit": "s", **told}


def _rates(
    folder: Path,
    multiring: Command,
    data: tuple[str, ...],
    case: tuple[int, int],
    todo: dict[int, str],
    seconds: float,
) -> Iterator[dict[str, Any]]:
    """Yield the grade of each prediction of one case.

    Args:
        folder: where measurements are kept.
        multiring: runs a command of multiring.
        data: the data set and its format, as words of a command.
        case: the number of ranks, and of the workers of each.
        todo: the names of the records, by the number of ranks that measure the worker.
        seconds: the duration of each measurement.
    """
    ranks, workers = case
    load, predicted = os.getloadavg()[0], {}
    for count, name in todo.items():
        one = folder / f"{Path(data[0]).parent.name}-{Path(data[0]).name}-{count}.json"
        if not one.exists():
            words = ["--workers", "1", "--seconds", str(seconds), "--save", str(one)]
            multiring(*_job(count), "data", "bench", *data, *words)
        predicted[name] = _predicted(folder, multiring, one, ranks, workers)
    said = multiring(*_job(ranks), "data", "bench", *data, "--workers", str(workers), "--seconds", str(seconds))
    rates = [float(rate) for rate in re.findall(r"fed\s+([\d.]+) samples/s", said)]
    if len(rates) != ranks:
        raise SystemExit(f"{data[0]}, {ranks} x {workers}: {len(rates)} ranks told their rates, want {ranks}")
    for name, found in predicted.items():
        told = _graded(found["samples_per_s_of_rank"], mean(rates))
        yield {"case": name, "load": load, "bound": found["bound"], "unit": "samples/s", **told}


def _job(ranks: int) -> list[str]:
    """Return the words before a command of multiring that let `ranks` ranks run it."""
    return [] if ranks == 1 else ["run", "-n", str(ranks), "--", sys.executable, "-m", "multiring"]


def _predicted(folder: Path, multiring: Command, one: Path, ranks: int, workers: int) -> dict[str, Any]:
    """Return the predicted input of each rank, from the file of what one worker takes."""
    words = ["--topology", str(folder / "host.toml"), "--model", "resnet50", "--batch-per-rank", "64", "--rate", "1e9"]
    words += ["--ranks", str(ranks), "--input", str(one), "--workers", str(workers)]
    (step,) = json.loads(multiring("simulate", *words, "--cores-per-host", f"{os.cpu_count()}", "--json"))["steps"]
    found: dict[str, Any] = step["input"]
    return found


def _step(folder: Path, multiring: Command, data: tuple[str, str], sleep_ms: int) -> dict[str, Any]:
    """Return the grade of a step on two ranks, predicted from the profile of one."""
    profile = folder / f"fed-{Path(data[0]).parent.name}-{sleep_ms}.json"
    script = [sys.executable, str(TRAIN), *data, str(BATCH)]
    if not profile.exists():
        options = ["--ranks-per-host", "2", "-o", str(profile)]
        multiring("profile", *options, "--", *script, "999999", "1", str(sleep_ms))
    words = ["--profile", str(profile), "--topology", str(folder / "host.toml"), "--ranks", "2"]
    (step,) = json.loads(multiring("simulate", *words, "--cores-per-host", f"{os.cpu_count()}", "--json"))["steps"]
    said = multiring("run", "-n", "2", "--", *script, str(STEPS), "1", str(sleep_ms))
    steps = [float(each) for each in re.findall(r"median step: ([\d.e-]+) s", said)]
    return {"bound": step["bound"], **_graded(step["step_s"], mean(steps))}


def _graded(predicted: float, measured: float) -> dict[str, Any]:
    error = predicted / measured - 1
    return {"predicted": predicted, "measured": measured, "error": error, "is_within": abs(error) <= WITHIN}


def input_table(records: list[dict[str, Any]]) -> str:
    """Return a table of the records, and how many are within 10 %."""
    lines = [
        "| data | ranks x workers of each | predicted | measured | error | within 10 % | bound | load |",
        "|---" * 8 + "|",
    ]
    for each in records:
        cells = [
            each["data"],
            each["case"],
            *(f"{each[name]:.4g} {each['unit']}" for name in ("predicted", "measured")),
        ]
        cells += [f"{each['error']:+.1%}", "yes" if each["is_within"] else "NO", each["bound"], f"{each['load']:.1f}"]
        lines.append(f"| {' | '.join(cells)} |")
    for what, unit in (("rates of input", "samples/s"), ("steps", "s")):
        for source in SOURCES if unit != "s" else ("",):
            found = [each for each in records if each["unit"] == unit and each["case"].endswith(source)]
            if found:
                within = sum(each["is_within"] for each in found)
                lines.append(f"{what}, {source}".rstrip(", ") + f": {within} of {len(found)} within 10 %")
    return "\n".join(lines)
