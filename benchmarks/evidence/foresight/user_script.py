"""Grade predictions of a user's script, profiled on one rank, against runs on two ranks and on four hosts of a lab.

    python benchmarks/evidence/foresight/user_script.py [--only here,lab,wire,memory] [--models wide,...] [--folder F]
    python benchmarks/evidence/foresight/user_script.py --only input [--seconds 10] [--folder F]

here: the script on 2 ranks of this host, in five models and three batches. lab (as root): the same on 4 hosts of a lab,
where compute is slept through. wire (as root): there with bfloat16 on the wire, predicted by a sweep of the same
profile. memory (as root): the peak memory of the script itself on the hosts of the lab. The script that sleeps says
nothing about it: it has no activations, and its heap keeps freed gradients at times. input: the rate of input of two
workers, and of two ranks of this host, predicted from one worker of one rank; the data are pictures, arrays and packs.
Waits for a core are no part of that prediction, so on a busy machine, all that is measured is slower.

Each case is a line of FOLDER/records.jsonl, and is left out if it is there; the table is that of all records.
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

sys.path.insert(0, str(Path(__file__).parents[3]))  # lets this script import from the repository root

from benchmarks.evidence.foresight.input_rates import input_records, input_table

from multiring._settings import inherited_environment
from multiring.lab import LabPlan, parse_rate
from multiring.lab.topology_file import topology_text

ROOT = Path(__file__).parents[3]
TRAIN = Path(__file__).with_name("train.py")
BATCHES = (16, 64, 256)
MODELS = ("wide", "deep", "convolutional", "attention", "late")
HOSTS, LINK, WIRE = 4, "200mbit", "bf16"
STEPS, FEW_STEPS = 30, 10
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
    return graded(found, run, links, measured_bytes=peak_bytes(said))


def lab(folder: Path, model: str, batch: int) -> dict[str, Any]:
    """Grade the prediction for hosts of a lab, where compute is slept through."""
    found, links = asleep(folder, model, batch)
    return graded(found, run_in_lab(folder, model, batch), links)


def wire(folder: Path, model: str, batch: int) -> dict[str, Any]:
    """Grade the prediction of another wire type, which a sweep makes from the same profile."""
    found, links = asleep(folder, model, batch)
    told = graded(found, run_in_lab(folder, model, batch, "--wire", WIRE), links)
    words = ["--profile", str(found), "--topology", str(links), "--sweep", f"wire={WIRE}", "--json"]
    (point,) = json.loads(multiring("simulate", *words))["points"]
    for name, predicted in (("step", point["step_s"]), ("exposed communication", point["exposed_s"])):
        told["parts"][name] = part(predicted, told["parts"][name]["measured"])
    return told


def memory(folder: Path, model: str, batch: int) -> dict[str, Any]:
    """Grade the peak memory of the script, which computes, on the hosts of a lab."""
    found = profile(folder / f"{model}-{batch}.json", model, str(batch), "999")
    program = [sys.executable, str(TRAIN), model, str(batch), str(FEW_STEPS)]
    said = multiring("lab", "--hosts", str(HOSTS), "--link", LINK, "--", *program)
    predicted = json.loads(found.read_text(encoding="utf-8"))["peak_memory_bytes"]
    return {"steps": FEW_STEPS, "parts": {"peak memory": part(predicted, peak_bytes(said))}}


def asleep(folder: Path, model: str, batch: int) -> tuple[Path, Path]:
    """Return the profile of the script that sleeps, and the topology file that the lab gives its ranks."""
    real = profile(folder / f"{model}-{batch}.json", model, str(batch), "999")
    script = (model, str(batch), "999", "--asleep", str(real))
    found = profile(folder / f"asleep-{model}-{batch}.json", *script, ranks_per_host=HOSTS)
    links = folder / "lab.toml"
    links.write_text(topology_text(LabPlan(hosts=HOSTS, rails=(parse_rate(LINK),))), encoding="utf-8")
    return found, links


def run_in_lab(folder: Path, model: str, batch: int, *more: str) -> Path:
    """Run the script that sleeps on the hosts of a lab, and return its timeline."""
    run = folder / f"lab{''.join(more)}-{model}-{batch}.json.gz"
    program = [sys.executable, str(TRAIN), model, str(batch), str(STEPS)]
    program += ["--asleep", str(folder / f"{model}-{batch}.json"), *more]
    multiring("lab", "--hosts", str(HOSTS), "--link", LINK, "--", *program, MULTIRING_TIMELINE=str(run))
    return run


def peak_bytes(said: str) -> int:
    """Return the most memory of a rank, from what the script has printed."""
    return max(map(int, re.findall(r"peak memory: (\d+) bytes", said)))


def part(predicted: float, measured: float) -> dict[str, float]:
    """Return the grade of a part."""
    return {"predicted": predicted, "measured": measured, "error": abs(predicted - measured) / measured}


def graded(found: Path, run: Path, links: Path, measured_bytes: int | None = None) -> dict[str, Any]:
    """Return the grade of the prediction: its parts by name, predicted and measured, with the most memory of a rank."""
    words = ["simulate", "--profile", str(found), "--against", str(run), "--json", "--topology", str(links)]
    told = json.loads(multiring(*words))
    parts = {
        each["part"]: {"predicted": each["predicted"], "measured": each["measured"], "error": each["error"]}
        for each in told["parts"]
        if each["source"] == "predicted"
    }
    if measured_bytes is not None:
        parts["peak memory"] = part(told["peak_memory_bytes"], measured_bytes)
    return {"steps": told["steps"], "parts": parts}


CASES = {"here": here, "lab": lab, "wire": wire, "memory": memory}


def table(records: list[dict[str, Any]]) -> str:
    """Return a table of all records, and the median and the worst error of the step for each kind."""
    head = ["kind", "model", "batch", "step ms", "predicted", "error", "waiting ms", "predicted", "exposed ms"]
    head += ["predicted", "memory", "load"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for each in records:
        parts = each["parts"]
        cells = [each["kind"], each["model"], f"{each['batch']}"]
        cells += _pair(parts, "step")
        cells.append(f"{parts['step']['predicted'] / parts['step']['measured'] - 1:+.1%}" if "step" in parts else "-")
        cells += [*_pair(parts, "waiting for slower ranks"), *_pair(parts, "exposed communication")]
        cells.append(f"{parts['peak memory']['error']:.1%}" if "peak memory" in parts else "-")
        lines.append(f"| {' | '.join(cells)} | {each['load']:.1f} |")
    for kind in dict.fromkeys(each["kind"] for each in records):
        name = "peak memory" if kind == "memory" else "step"
        errors = [each["parts"][name]["error"] for each in records if each["kind"] == kind]
        lines.append(f"{kind}, {name}: {len(errors)} cases, median error {median(errors):.1%}, worst {max(errors):.1%}")
    return "\n".join(lines)


def _pair(parts: dict[str, dict[str, float]], name: str) -> list[str]:
    if name not in parts:
        return ["-", "-"]
    return [f"{parts[name]['measured'] * 1e3:.1f}", f"{parts[name]['predicted'] * 1e3:.1f}"]


def main() -> None:
    """Run the cases that are not recorded, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(CASES), help="kinds of cases")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--batches", default=",".join(map(str, BATCHES)))
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "evidence_user_script")
    parser.add_argument("--seconds", type=float, default=10.0, help="length of a measurement of input")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    file = arguments.folder / "records.jsonl"
    records = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    done = {(each["kind"], each["model"], each["batch"]) for each in records}
    kinds = arguments.only.split(",")
    if "input" in kinds:
        kinds.remove("input")
        grade_input(arguments.folder, arguments.seconds)
    for kind in kinds:
        for model in arguments.models.split(","):
            for batch in map(int, arguments.batches.split(",")):
                if (kind, model, batch) in done:
                    continue
                load = os.getloadavg()[0]
                found = CASES[kind](arguments.folder, model, batch)
                records.append({"kind": kind, "model": model, "batch": batch, "load": load, **found})
                with file.open("a") as out:
                    out.write(json.dumps(records[-1]) + "\n")
                shown = "peak memory" if kind == "memory" else "step"
                print(f"{kind} {model} {batch}: {shown} {records[-1]['parts'][shown]}", flush=True)
    if records:
        print(table(records))


def grade_input(folder: Path, seconds: float) -> None:
    """Measure the cases of input that are not recorded, and print their table."""
    file = folder / "input.jsonl"
    records = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    for record in input_records(folder, multiring, seconds, {(each["data"], each["case"]) for each in records}):
        records.append(record)
        with file.open("a") as out:
            out.write(json.dumps(record) + "\n")
        print(f"{record['data']}, {record['case']}: {record['error']:+.1%}", flush=True)
    print(input_table(records))


if __name__ == "__main__":
    main()
