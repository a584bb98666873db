"""Compare random programs of collectives and messages on device tensors with NumPy, on the stand-ins of CUDA.

    python benchmarks/evidence/torch/random_on_devices.py [--seconds 1800] [--seed 0] [--again] [--messages]

A seed draws a program. Every second job has programs of `multiring.torch`, and tests/support/device_programs.py says
what is random; the others have programs of `Group.on_device`, by NCCL or through host memory, and
tests/support/engine_programs.py says it. With `--messages`, all jobs have programs of messages between two ranks on
torch's backend "multiring", some of them wrong, and tests/support/message_programs.py says what is random. Jobs of one,
two and four ranks on one, two and four hosts take turns, each with some seeds. The program needs a checkout and the
environment of `make test-cuda`.

The runs are recorded in build/evidence/random_on_devices.json, those of messages in random_messages.json. The same
command, started again, continues from there until all its runs together have taken `--seconds`. A fault is printed with
its seed and shape, and is recorded.

Exit code 1: a program gave wrong values, or a rank failed or did not end.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
RECORD = ROOT / "build" / "evidence" / "random_on_devices.json"
MESSAGES_RECORD = RECORD.with_name("random_messages.json")
SHAPES = ((1, 1), (1, 2), (2, 1), (1, 4), (2, 2), (4, 1))  # hosts, and ranks of each
AT_ONCE = 5  # seeds of a job
DELAYS_US = (200, 1500, 4000)
ENGINES = ("nccl", "staged", "staged", "nccl", "staged")  # 5, so that each has all shapes
LIMIT_S = 240.0  # of a job's programs of an engine
SHOWN = 2000  # characters of the beginning of a rank's error, and of its end


def turn(number: int, *, has_messages: bool) -> dict[str, Any]:
    """Run the programs of one job; return the hosts, the ranks of a host, and the fault, if there is one."""
    shapes = SHAPES[1:] if has_messages else SHAPES  # a rank sends no message to itself
    turns = number if has_messages else number // 2
    hosts, devices = shapes[turns % len(shapes)]
    seeds = list(range(1000 + number * AT_ONCE, 1000 + (number + 1) * AT_ONCE))
    delay_us = DELAYS_US[turns // len(shapes) % len(DELAYS_US)]
    found: dict[str, Any] = {"number": number, "hosts": hosts, "devices": devices, "seeds": seeds, "fault": None}
    try:
        if has_messages:
            found["counts"] = run_messages(seeds, (hosts, devices), {"seed": number, "delay_us": delay_us})
        elif number % 2:
            found["engine"] = ENGINES[number // 2 % len(ENGINES)]
            run_on_engine(seeds, found["engine"], (hosts, devices), delay_us)
        else:
            run_with_torch(seeds, (hosts, devices), {"seed": number, "delay_us": delay_us})
    except AssertionError as error:
        # The rank that has ended without an error is often the cause.
        found["fault"] = "\n--- rank".join(shown(each) for each in str(error).split("\n--- rank"))
    return found


def shown(text: str) -> str:
    """Return the beginning of a text, where a signal is, and its end, where an error is."""
    return text if len(text) <= 2 * SHOWN else f"{text[:SHOWN]}\n...\n{text[-SHOWN:]}"


def run_with_torch(seeds: list[int], shape: tuple[int, int], standin: dict[str, Any]) -> None:
    """Run programs of `multiring.torch`; raise AssertionError if one is wrong."""
    from tests.support.cuda_torch_ranks import run_cuda  # noqa: PLC0415 -- needs torch's CUDA build
    from tests.support.device_programs import run_programs  # noqa: PLC0415 -- needs torch's CUDA build

    hosts, devices = shape
    run_cuda(run_programs, seeds, hosts=hosts, devices=devices, standin={"devices": max(devices, 2), **standin})


def run_messages(seeds: list[int], shape: tuple[int, int], standin: dict[str, Any]) -> dict[str, int]:
    """Run programs of messages; return how many there were of each kind. Raise AssertionError if a program is wrong."""
    from tests.support.cuda_torch_ranks import run_cuda  # noqa: PLC0415 -- needs torch's CUDA build
    from tests.support.message_programs import run_message_programs  # noqa: PLC0415 -- needs torch's CUDA build

    hosts, devices = shape
    standin = {"devices": max(devices, 2), **standin}
    with tempfile.TemporaryDirectory() as folder:
        every = run_cuda(
            run_message_programs, seeds, folder, hosts=hosts, devices=devices, standin=standin, deadline_s=LIMIT_S
        )
    counts: dict[str, int] = every[0]
    return counts


def run_on_engine(seeds: list[int], engine: str, shape: tuple[int, int], delay_us: int) -> None:
    """Run programs of `Group.on_device`; raise AssertionError if one is wrong."""
    from tests.support.engine_programs import run_engine_programs  # noqa: PLC0415 -- needs the stand-ins
    from tests.support.ranks import run_ranks  # noqa: PLC0415 -- needs the stand-ins

    hosts, devices = shape
    carrier = "shm" if hosts == 1 else "tcp" if devices == 1 else "shm+tcp"
    run_ranks(run_engine_programs, hosts * devices, seeds, engine, delay_us, engine=carrier, deadline_s=LIMIT_S)


def inside(first: int, end_s: float, *, has_messages: bool) -> None:
    """Run jobs until `end_s`, in a process that has the stand-ins; print a line of JSON for each."""
    number = first
    while time.time() < end_s:
        start_s = time.monotonic()
        found = turn(number, has_messages=has_messages)
        print(json.dumps({**found, "seconds": time.monotonic() - start_s}), flush=True)
        number += 1


def save(runs: list[dict[str, Any]], record: Path) -> None:
    """Replace the record."""
    record.parent.mkdir(parents=True, exist_ok=True)
    beside = record.with_suffix(".new")
    beside.write_text("".join(json.dumps(each) + "\n" for each in runs), encoding="utf-8")
    beside.replace(record)


def main(given: list[str] | None = None) -> int:
    """Run jobs until the time is over, and return the exit code. `given` replaces the command's arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1800.0, help="total time of all runs of this command")
    parser.add_argument("--seed", type=int, default=0, help="number of the first job")
    parser.add_argument("--again", action="store_true", help="drop the record of earlier runs")
    parser.add_argument("--messages", action="store_true", help="programs of messages between two ranks")
    parser.add_argument("--inside", type=float, help=argparse.SUPPRESS)
    arguments = parser.parse_args(given)
    if arguments.inside is not None:
        inside(arguments.seed, arguments.inside, has_messages=arguments.messages)
        return 0
    record = MESSAGES_RECORD if arguments.messages else RECORD
    runs: list[dict[str, Any]] = []
    if record.exists() and not arguments.again:
        runs = [json.loads(line) for line in record.read_text(encoding="utf-8").splitlines()]
    left_s = arguments.seconds - sum(each["seconds"] for each in runs)
    if left_s > 0:
        first = max([arguments.seed - 1, *(each["number"] for each in runs)]) + 1
        program = ["python", "-m", "tests.standin", str(Path(__file__).resolve())]
        command = [
            str(ROOT / ".ci" / "with-cuda"),
            *program,
            "--seed",
            str(first),
            "--inside",
            str(time.time() + left_s),
            *(["--messages"] if arguments.messages else []),
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # noqa: TID251 -- includes the tests' variables
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, cwd=ROOT) as process:  # noqa: S603
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith(b'{"number"'):
                    runs.append(json.loads(line))
                    save(runs, record)
                    if (fault := runs[-1]["fault"]) is not None:
                        print(f"FAULT in job {runs[-1]['number']}: {fault}", file=sys.stderr)
        if process.returncode:
            print(f"the jobs ended with exit code {process.returncode}", file=sys.stderr)
            return 1
    faults = [each for each in runs if each["fault"] is not None]
    programs, seconds = sum(len(each["seeds"]) for each in runs), sum(each["seconds"] for each in runs)
    print(f"{programs} programs in {len(runs)} jobs, {seconds / 60:.1f} min: {len(faults)} jobs with faults")
    counts = sum((Counter(each.get("counts", {})) for each in runs), Counter())
    print("".join(f"  {name}: {number}\n" for name, number in counts.items()), end="")
    for each in faults:
        repeat = f"--again --seed {each['number']}{' --messages' if arguments.messages else ''}"
        print(f"  repeat job {each['number']} ({each['hosts']} x {each['devices']}): {repeat}")
    return 1 if faults or not runs else 0


if __name__ == "__main__":
    sys.exit(main())
