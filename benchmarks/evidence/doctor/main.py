"""Seed faults into labs, and check that `multiring doctor` names exactly them.

    sudo .venv/bin/python benchmarks/evidence/doctor/main.py [--runs 5] [--seed 1] [--only KIND,...] [--again]

For each kind of finding, some labs get one fault at a random place. About half of the severities are just healthy
and must give no finding; of the others exactly the seeded cause must be named. Then 30 labs of ten shapes are
healthy, six of them beside a build, where "busy" is the only finding allowed. Other work on this machine is outside of
the claims, too, so "busy" never counts, and the load is recorded.

Each run is recorded in build/evidence/. The same command, started again, continues from there. The confusion matrix is
printed at the end. The exit code is 1 if a cause was missed, a false one was named, or more than a tenth of the healthy
runs could not look.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))  # lets this script import from the repository root

from benchmarks.evidence.doctor.seeds import (
    KINDS,
    NEED_FILES,
    NEED_MEMORY,
    NEED_SHM,
    SHAPES,
    Trial,
    mpi_start,
    trial_of,
)
from benchmarks.evidence.support.claims import ROOT, commit, machine

from multiring._settings import inherited_environment

RANK = Path(__file__).with_name("rank.py")
HEALTHY, BESIDE = 30, 6
DEADLINE_S = 300.0
LARGEST_TENTH = 0.1
BUILD = "a = 0\nwhile True:\n    a = hash((a, str(a)))\n"
NONE, COULD_NOT = "nothing", "could not look"
Record = dict[str, Any]


def main() -> int:
    """Run the trials that are not recorded, and print the table and the confusion matrix."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="runs of each kind")
    parser.add_argument("--seed", type=int, default=1, help="seed of places and severities")
    parser.add_argument("--only", default=",".join([*KINDS, "healthy"]), help="kinds, separated by commas")
    parser.add_argument("--again", action="store_true", help="drop the records of earlier runs")
    arguments = parser.parse_args()
    wanted = arguments.only.split(",")
    if unknown := set(wanted) - {*KINDS, "healthy"}:
        parser.error(f"unknown {', '.join(unknown)}; known are {', '.join(KINDS)}, healthy")
    path = ROOT / "build" / "evidence" / f"doctor-{arguments.seed}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    if arguments.again:
        path.unlink(missing_ok=True)
    records = {record["name"]: record for record in map(json.loads, path.open())} if path.exists() else {}
    print(f"# What the doctor names, {time.strftime('%Y-%m-%d %H:%M')}\n")
    print(f"`{' '.join(['python', *sys.argv])}` at commit {commit()}, {machine()}\n", flush=True)
    print("| run | seeded | severity | must be named | named | right | s | load |\n|---|---|---|---|---|---|---|---|")
    chosen = []
    for label, trial, is_beside in trials(wanted, arguments.runs, arguments.seed):
        if label not in records:
            records[label] = record_of(label, trial, is_beside=is_beside)
            with path.open("a") as file:
                print(json.dumps(records[label]), file=file)
        chosen.append(records[label])
        print(row(records[label]), flush=True)
    print(f"\n{confusion(chosen)}\n")
    healthy = [each for each in chosen if each["name"].startswith("healthy")]
    not_looked = sum(each["named"] == [COULD_NOT] for each in healthy)
    wrong = [each for each in chosen if not each["is_right"] and each not in healthy]
    wrong += [each for each in healthy if each["named"] not in ([], [COULD_NOT])]
    print(f"{len(chosen)} runs, {len(wrong)} wrong; healthy: {len(healthy)}, could not look: {not_looked}")
    return 1 if wrong or not_looked > LARGEST_TENTH * len(healthy) else 0


def trials(wanted: Sequence[str], runs: int, seed: int) -> Iterator[tuple[str, Trial, bool]]:
    """Yield each trial's name, the trial, and whether it runs beside a build. Kinds take turns."""
    for number in range(runs):
        for kind in KINDS:
            if kind in wanted:
                yield f"{kind} {number}", trial_of(kind, number, seed), False
    for number in range(HEALTHY if "healthy" in wanted else 0):
        trial = Trial(kind="healthy", is_ill=False, shape=SHAPES[number % len(SHAPES)])
        yield f"healthy {number}", trial, number >= HEALTHY - BESIDE


def record_of(label: str, trial: Trial, *, is_beside: bool) -> Record:
    """Run a trial and return its record."""
    needs = ["--need-memory", str(NEED_MEMORY), "--need-shm", str(NEED_SHM), "--need-files", str(NEED_FILES)]
    command = [sys.executable, str(RANK), json.dumps(trial.faults), *needs]
    environment = inherited_environment() | trial.variables
    if trial.mpi is None:
        timed = [word for each in trial.timed for word in ("--at", "0", each)]
        command = [sys.executable, "-m", "multiring", "lab", *trial.shape.words(), *timed, "--", *command]
    else:
        prefix, environment = mpi_start(trial)
        command = [*prefix, *command]
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    load, began_s = os.getloadavg()[0], time.monotonic()
    with contextlib.ExitStack() as stack:
        for _ in range(2 * is_beside):
            worker = stack.enter_context(subprocess.Popen([sys.executable, "-c", BUILD]))  # noqa: S603 -- our own
            stack.callback(worker.kill)
        try:
            done = subprocess.run(  # noqa: S603 -- our own
                command, env=environment, capture_output=True, text=True, timeout=DEADLINE_S, check=False
            )
            output, errors = done.stdout, done.stderr
        except subprocess.TimeoutExpired:
            output, errors = "", f"no end within {DEADLINE_S:g} s"
    lines = [line[line.index("{") :] for line in output.splitlines() if '"findings"' in line]
    report = json.loads(lines[0]) if len(lines) == 1 else None
    found: list[str] = [COULD_NOT]
    if report is not None and report["code"] != 2:
        found = sorted(f"{each['kind']}: {each['where']}" for each in report["findings"] if each["kind"] != "busy")
    must = [f"{trial.kind}: {', '.join(trial.where)}"] if trial.is_ill else []
    return {
        "name": label,
        "kind": trial.kind if trial.is_ill else "healthy side" if trial.kind != "healthy" else "healthy",
        "severity": trial.severity + (" beside a build" if is_beside else ""),
        "must": must,
        "named": found,
        # A host may have several findings of the seeded kind, such as a GPU of another model and a missing one.
        "is_right": sorted(set(found)) == must,
        "seconds": round(time.monotonic() - began_s, 1),
        "load": round(load, 1),
        "lab": " ".join(trial.shape.words()),
        "said": [each["found"] for each in report["findings"]] if report else [errors[-600:]],
    }


def row(record: Record) -> str:
    """Return a row of the table."""
    cells = [record["name"], record["kind"], record["severity"], "; ".join(record["must"]) or NONE]
    cells += ["; ".join(record["named"]) or NONE, "yes" if record["is_right"] else "**NO**"]
    return f"| {' | '.join(cells)} | {record['seconds']:.0f} | {record['load']} |"


def confusion(records: Sequence[Record]) -> str:
    """Return the confusion matrix: a row for each seeded kind, a column for each kind that was named."""
    seeded = [each for each in [*KINDS, "healthy side", "healthy"] if any(one["kind"] == each for one in records)]
    counts = {each: Counter[str]() for each in seeded}
    for record in records:
        kinds = {each.partition(":")[0] for each in record["named"]} or {NONE}
        counts[record["kind"]].update(kinds)
    columns = [each for each in [*KINDS, NONE, COULD_NOT] if any(count[each] for count in counts.values())]
    lines = ["| seeded \\ named | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    lines += [f"| {each} | " + " | ".join(str(counts[each][one] or "") for one in columns) + " |" for each in seeded]
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
