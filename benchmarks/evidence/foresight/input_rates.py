"""The cases of `user_script.py --only input`: predicted rates of input against those that are measured.

A rate is predicted from one worker on one rank (`multiring data bench --workers 1 --save`), and measured by
`multiring data bench` with more workers and on two ranks at once. A step is predicted from the profile of a script on
one rank that reads the data, and measured on two ranks.
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
        one = folder / f"{case}-{part}.json"
        for ranks, workers in CASES:
            name = f"{ranks} x {workers}"
            if (kind, name) in done:
                continue
            load = os.getloadavg()[0]
            if not one.exists():
                multiring("data", "bench", *data, "--workers", "1", "--seconds", str(seconds), "--save", str(one))
            words = ["--topology", str(folder / "host.toml"), "--model", "resnet50", "--batch-per-rank", "64"]
            words += ["--rate", "1e9", "--ranks", str(ranks), "--input", str(one), "--workers", str(workers)]
            (step,) = json.loads(multiring("simulate", *words, "--cores-per-host", f"{os.cpu_count()}", "--json"))[
                "steps"
            ]
            bench = ["data", "bench", *data, "--workers", str(workers), "--seconds", str(seconds)]
            job = [] if ranks == 1 else ["run", "-n", str(ranks), "--", sys.executable, "-m", "multiring"]
            rates = [float(rate) for rate in re.findall(r"fed\s+([\d.]+) samples/s", multiring(*job, *bench))]
            if len(rates) != ranks:
                raise SystemExit(f"{kind}, {name}: {len(rates)} ranks told their rates, want {ranks}")
            told = _graded(step["input"]["samples_per_s_of_rank"], mean(rates))
            yield {
                "data": kind,
                "case": name,
                "load": load,
                "bound": step["input"]["bound"],
                "unit": "samples/s",
                **told,
            }
        if part == "files" or case == "small":
            continue
        for sleep_ms in SLEEPS:
            name = f"step of 2 x 1, {sleep_ms} ms of compute"
            if (kind, name) in done:
                continue
            load = os.getloadavg()[0]
            told = _step(folder, multiring, (str(place / part), form), sleep_ms)
            yield {"data": kind, "case": name, "load": load, "unit": "s", **told}


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
    lines = ["| data | ranks x workers | predicted | measured | error | within 10 % | bound | load |", "|---" * 8 + "|"]
    for each in records:
        cells = [
            each["data"],
            each["case"],
            *(f"{each[name]:.4g} {each['unit']}" for name in ("predicted", "measured")),
        ]
        cells += [f"{each['error']:+.1%}", "yes" if each["is_within"] else "NO", each["bound"], f"{each['load']:.1f}"]
        lines.append(f"| {' | '.join(cells)} |")
    for what, unit in (("rates of input", "samples/s"), ("steps", "s")):
        found = [each for each in records if each["unit"] == unit]
        if found:
            within = sum(each["is_within"] for each in found)
            lines.append(f"{what}: {within} of {len(found)} within 10 %")
    return "\n".join(lines)
