"""Grade predictions of a user's script, profiled on one rank, against runs on two ranks and on four hosts of a lab.

    python benchmarks/evidence/foresight/user_script.py [--only here,lab,wire] [--models wide,...] [--folder F]

here: the script on 2 ranks of this host, in five models and three batches. lab (as root): the same on 4 hosts of a lab,
where compute is slept through. wire (as root): there with bfloat16 on the wire, predicted by a sweep of the same
profile. Each case is a line of FOLDER/records.jsonl, and is left out if it is there; the table is that of all records.
Predictions use the links that `multiring probe` measured on this host, and in the lab the topology file that the lab
gives its ranks. A profile for the lab is taken beside three copies, because its hosts share the cores of this one.
Other work on the machine lengthens steps here, and hardly those of the lab: the table has the load of each case.
"""

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

from multiring._settings import inherited_environment
from multiring.lab import LabPlan, parse_rate
from multiring.lab.topology_file import topology_text

ROOT = Path(__file__).parents[3]
TRAIN = Path(__file__).with_name("train.py")
BATCHES = (16, 64, 256)
MODELS = ("wide", "deep", "convolutional", "attention", "late")
HOSTS, LINK, WIRE = 4, "200mbit", "bf16"
STEPS = 30
JOB_S = 1200


def multiring(*words: str, **variables: str) -> str:
    """Run a command of multiring, and return what it prints."""
    environment = {**inherited_environment(), **variables, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    ended = subprocess.run(  # noqa: S603 -- this program itself
        [sys.executable, "-m", "multiring", *words],
        env=environment,
        capture_output=True,
        text=True,
        timeout=JOB_S,
        check=False,
    )
    if ended.returncode:
        raise SystemExit(f"multiring {' '.join(words)}: {ended.returncode}\n{ended.stderr[-3000:]}")
    return ended.stdout


def profile(path: Path, *script: str, ranks_per_host: int = 2) -> Path:
    """Profile the script on one rank, once, and return the profile's path."""
    if not path.exists():
        options = ["--ranks-per-host", str(ranks_per_host), "-o", str(path)]
        multiring("profile", *options, "--", sys.executable, str(TRAIN), *script)
    return path


def here(folder: Path, model: str, batch: int) -> dict[str, Any]:
    """Grade the prediction for 2 ranks of this host."""
    found = profile(folder / f"{model}-{batch}.json", model, str(batch), "999")
    links = folder / "here.toml"
    if not links.exists():
        multiring("run", "-n", "2", "--", sys.executable, "-m", "multiring", "probe", "--save", str(links))
    run = folder / f"here-{model}-{batch}.json.gz"
    program = [sys.executable, str(TRAIN), model, str(batch), str(STEPS)]
    said = multiring("run", "-n", "2", "--timeline", str(run), "--", *program)
    return graded(found, run, links, said)


def lab(folder: Path, model: str, batch: int) -> dict[str, Any]:
    """Grade the prediction for hosts of a lab, where compute is slept through."""
    found, links = asleep(folder, model, batch)
    return graded(found, *run_in_lab(folder, model, batch, links))


def wire(folder: Path, model: str, batch: int) -> dict[str, Any]:
    """Grade the prediction of another wire type, which a sweep makes from the same profile."""
    found, links = asleep(folder, model, batch)
    told = graded(found, *run_in_lab(folder, model, batch, links, "--wire", WIRE))
    words = ["--profile", str(found), "--topology", str(links), "--sweep", f"wire={WIRE}", "--json"]
    (point,) = json.loads(multiring("simulate", *words))["points"]
    for part, predicted in (("step", point["step_s"]), ("exposed communication", point["exposed_s"])):
        measured = told["parts"][part]["measured"]
        told["parts"][part] = {
            "predicted": predicted,
            "measured": measured,
            "error": abs(predicted - measured) / measured,
        }
    return told


def asleep(folder: Path, model: str, batch: int) -> tuple[Path, Path]:
    """Return the profile of the script that sleeps, and the topology file that the lab gives its ranks."""
    real = profile(folder / f"{model}-{batch}.json", model, str(batch), "999")
    script = (model, str(batch), "999", "--asleep", str(real))
    found = profile(folder / f"asleep-{model}-{batch}.json", *script, ranks_per_host=HOSTS)
    links = folder / "lab.toml"
    links.write_text(topology_text(LabPlan(hosts=HOSTS, rails=(parse_rate(LINK),))), encoding="utf-8")
    return found, links


def run_in_lab(folder: Path, model: str, batch: int, links: Path, *more: str) -> tuple[Path, Path, str]:
    """Run the script that sleeps on the hosts of a lab, and return its timeline, `links` and what it printed."""
    run = folder / f"lab{''.join(more)}-{model}-{batch}.json.gz"
    program = [sys.executable, str(TRAIN), model, str(batch), str(STEPS)]
    program += ["--asleep", str(folder / f"{model}-{batch}.json"), *more]
    said = multiring("lab", "--hosts", str(HOSTS), "--link", LINK, "--", *program, MULTIRING_TIMELINE=str(run))
    return run, links, said


def graded(found: Path, run: Path, links: Path, said: str) -> dict[str, Any]:
    """Return the grade of the prediction: its parts by name, predicted and measured, and the most memory of a rank."""
    words = ["simulate", "--profile", str(found), "--against", str(run), "--json", "--topology", str(links)]
    told = json.loads(multiring(*words))
    memory = max(map(int, re.findall(r"peak memory: (\d+) bytes", said)))
    parts = {
        each["part"]: {"predicted": each["predicted"], "measured": each["measured"], "error": each["error"]}
        for each in told["parts"]
        if each["source"] == "predicted"
    }
    predicted = told["peak_memory_bytes"]
    parts["peak memory"] = {"predicted": predicted, "measured": memory, "error": abs(predicted - memory) / memory}
    return {"steps": told["steps"], "parts": parts}


CASES = {"here": here, "lab": lab, "wire": wire}


def table(records: list[dict[str, Any]]) -> str:
    """Return a table of all records, and the median and the worst error of the step for each kind."""
    lines = [
        "| kind | model | batch | step ms | predicted | error | exposed ms | predicted | memory | load |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for each in records:
        step, exposed, memory = (each["parts"][part] for part in ("step", "exposed communication", "peak memory"))
        lines.append(
            f"| {each['kind']} | {each['model']} | {each['batch']} | {step['measured'] * 1e3:.1f} | "
            f"{step['predicted'] * 1e3:.1f} | {step['predicted'] / step['measured'] - 1:+.1%} | "
            f"{exposed['measured'] * 1e3:.1f} | {exposed['predicted'] * 1e3:.1f} | {memory['error']:.1%} | "
            f"{each['load']:.1f} |"
        )
    for kind in dict.fromkeys(each["kind"] for each in records):
        errors = [each["parts"]["step"]["error"] for each in records if each["kind"] == kind]
        lines.append(f"{kind}: {len(errors)} cases, median error {median(errors):.1%}, worst {max(errors):.1%}")
    return "\n".join(lines)


def main() -> None:
    """Run the cases that are not recorded, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(CASES), help="kinds of cases")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--batches", default=",".join(map(str, BATCHES)))
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "evidence_user_script")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    file = arguments.folder / "records.jsonl"
    records = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    done = {(each["kind"], each["model"], each["batch"]) for each in records}
    for kind in arguments.only.split(","):
        for model in arguments.models.split(","):
            for batch in map(int, arguments.batches.split(",")):
                if (kind, model, batch) in done:
                    continue
                load = os.getloadavg()[0]
                found = CASES[kind](arguments.folder, model, batch)
                records.append({"kind": kind, "model": model, "batch": batch, "load": load, **found})
                with file.open("a") as out:
                    out.write(json.dumps(records[-1]) + "\n")
                print(f"{kind} {model} {batch}: {records[-1]['parts']['step']}", flush=True)
    print(table(records))


if __name__ == "__main__":
    main()
