"""Kill the launcher or a rank of recorded jobs at random moments; the record must be readable each time.

    python benchmarks/evidence/live/main.py [--kills 100] [--seed 0]

Each job has two ranks, which take steps with long metrics; all jobs append to one record, as jobs of one user do. In
half of the jobs SIGKILL ends the launcher, else a rank, which `--max-restarts 1` starts again. After each kill every
line of the record must be whole, except a last one without an end; the lines before the job must be unchanged; the
page's state must be made from it; and the job's ranks must have ended. The exit code is 1 if not.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from prometheus_client.openmetrics.parser import text_string_to_metric_families

from multiring._launch.live_record import read_record
from multiring._launch.live_state import LiveState

PROGRAM = """
import sys, time
from pathlib import Path
import multiring
group = multiring.init()
Path(sys.argv[1]).with_name(f"pid-{group.rank}").write_text(str(multiring._runtime.job.job.current().pid))
step = 0
while True:
    step += 1
    group.barrier()
    multiring.log_metrics(step=step, **{"metric " + "x" * 80 + str(each): step / 7 for each in range(16)})
    time.sleep(0.001)
"""


def main() -> int:
    """Kill, and print what was found; return 1 if a record was not whole."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    dice = random.Random(arguments.seed)  # noqa: S311 -- moments of kills
    faults: list[str] = []
    torn = lines = reports = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "program.py").write_text(PROGRAM)
        record = folder / "run.jsonl"
        record.touch()
        for number in range(arguments.kills):
            before = record.read_bytes()
            killed = killed_once(folder, dice, is_launcher=number % 2 == 0)
            after = record.read_bytes()
            faults += [f"kill {number} ({killed}): {each}" for each in faults_of(before, after)]
            new = list(read_record(after[len(before) :]))
            torn += not after.endswith(b"\n")
            lines += len(new)
            reports += sum(each["kind"] == "steps" for each in new)
            print(f"{number + 1:4d} {killed:9s} {len(new):5d} lines {len(faults)} faults", flush=True)
    print(f"{arguments.kills} kills, {lines} lines, {reports} reports, {torn} torn last lines, {len(faults)} faults")
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores", *faults, sep="\n")
    return int(bool(faults))


def killed_once(folder: Path, dice: random.Random, *, is_launcher: bool) -> str:
    """Start a job, kill its launcher or one of its ranks at a random moment, and return which."""
    for each in folder.glob("pid-*"):
        each.unlink()
    options = ["-n", "2", "--page", "0", "--record", "run.jsonl", "--max-restarts", "1"]
    command = [sys.executable, "-m", "multiring", "run", *options, "program.py", str(folder / "there")]
    started = subprocess.Popen(command, cwd=folder, stderr=subprocess.DEVNULL)  # noqa: S603 -- multiring
    if is_launcher and dice.random() < 0.3:  # in its start
        time.sleep(3.0 * dice.random())
        started.kill()
        started.wait()
        return "launcher"
    while len(found := [each.read_text() for each in folder.glob("pid-*")]) < 2 or not all(found):
        time.sleep(0.01)
    time.sleep(3.0 * dice.random())
    if is_launcher:
        started.kill()
        started.wait()
        return "launcher"
    os.kill(int(dice.choice(found)), signal.SIGKILL)
    time.sleep(2.0 * dice.random())
    started.send_signal(signal.SIGTERM)
    started.wait()
    return "rank"


def faults_of(before: bytes, after: bytes) -> list[str]:
    """Return what is wrong with a record after a job was killed."""
    found = []
    if not after.startswith(before):
        found.append("earlier lines were changed")
    *whole, last = after[len(before) :].split(b"\n")
    # The job before may have left a torn line, which the next job ends.
    for line in whole[1:] if before and not before.endswith(b"\n") else whole:
        try:
            json.loads(line)
        except ValueError:
            found.append(f"a line is torn: {line[:100]!r}")
    state = LiveState()
    for line in (*whole, last):
        state.take(line)
    json.dumps(state.snapshot(), allow_nan=False)
    if not list(text_string_to_metric_families(state.metrics())):  # type: ignore[no-untyped-call]  # it has no types
        found.append("no metrics")
    return found


if __name__ == "__main__":
    sys.exit(main())
