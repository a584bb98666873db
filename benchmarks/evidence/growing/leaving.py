"""Send SIGTERM to random ranks at random times, and check that no step is lost.

    python benchmarks/evidence/growing/leaving.py [--signals 50] [--seed 0] [--results FILE]

Each job has 2 to 4 ranks on this host, and newcomers replace those that leave, in half of the jobs more than one. They
train with NumPy, or in a third of the jobs with torch. Ranks get SIGTERM at random times, some two at once, some just
after they came in; one rank of the start is spared, so that somebody has the state. Every rank that gets it must leave
in order. No rank may go back to a former commit, so no step is done twice, and the weights must equal, to 1e-10, those
of the same steps in one process, with as many ranks at each step. A rank that is asked when others have done the last
step may fail the job. The job's seed is the first one plus its number; a
further run with the same results file goes on with the next one.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))  # lets this script import from the repository root

from benchmarks.evidence.growing.main import counted, faults_in, ranks_of
from benchmarks.evidence.shrinking.main import RANK, end_of_output, is_late, run_job, send
from benchmarks.evidence.support.claims import commit, machine

STEPS, DEADLINE_S, LEFT = 160, 400.0, "has left, because it got SIGTERM"
ASKED = 128 + signal.SIGTERM
PAUSES_S = (0.0, 0.0, 0.02, 0.2, 0.5, 1.0, 2.0)
MOST_SIGNALS = 5


def main() -> int:
    """Run jobs until enough signals were sent, and print a table; return 1 if a job was wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--signals", type=int, default=50, help="how many signals to send in all jobs")
    parser.add_argument("--seed", type=int, default=0, help="the seed of the first job")
    parser.add_argument("--results", type=Path, default=Path("build/leaving.jsonl"), help="file with a line a job")
    arguments = parser.parse_args()
    arguments.results.parent.mkdir(parents=True, exist_ok=True)
    text = arguments.results.read_text() if arguments.results.exists() else ""
    done = [json.loads(line) for line in text.splitlines()]
    while sum(row["left"] for row in done) < arguments.signals:
        seed, kind = arguments.seed + len(done), ("numpy", "torch", "numpy")[len(done) % 3]
        done.append({"seed": seed, "kind": kind, **job(seed, ("auto", "tcp")[len(done) % 2], kind)})
        with arguments.results.open("a") as file:
            file.write(json.dumps(done[-1]) + "\n")
        if done[-1]["faults"]:
            print(done[-1], flush=True)
    wrong, numbers = sum(bool(row["faults"]) for row in done), ("sent", "left", "late", "joins", "lost")
    print(
        f"# SIGTERM to ranks, {time.strftime('%Y-%m-%d %H:%M')}\n\n"
        f"`{' '.join(sys.argv)}` at commit {commit()}, {machine()}\n\n"
        "| jobs | wrong | SIGTERM sent | ranks that left | at the job's end | newcomers let in | steps lost | load |\n"
        "|---|---|---|---|---|---|---|---|"
    )
    counts = [sum(row[name] for row in done) for name in numbers]
    print("|", " | ".join(map(str, [len(done), wrong, *counts, f"{os.getloadavg()[0]:.0f}"])), "|")
    return 1 if wrong else 0


def job(seed: int, engine: str, kind: str) -> dict[str, Any]:
    """Run a job; return what was done to it, and what was wrong."""
    random = Random(seed)  # noqa: S311 -- no secret
    size = random.randint(2, 4)
    most = size + random.randint(0, 1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        variables = {"MULTIRING_ENGINE": engine, "MULTIRING_STALL_TIMEOUT_S": "60"}
        words = [*ranks_of(size, most), str(RANK), name, str(STEPS), "0.04", kind]
        ended = run_job(folder, words, variables, lambda process: ask(process, folder, size, random), DEADLINE_S)
        if ended is None:
            told = end_of_output(folder)
            return {"faults": ["it hangs", told], "sent": 0, "left": 0, "late": 0, "joins": 0, "lost": 0}
        (sent, last_s), code = ended
        told = (folder / "output").read_text()
        lines = [line.split() for line in (folder / "log").read_text().splitlines()]
        faults = faults_in(folder, STEPS, 0 if code == ASKED and is_late(lines, last_s, STEPS) else code)
        left = told.count(LEFT)
        # A rank that gets the signal when it has done the last step does not leave.
        late = sent - left
        faults += [f"a rank {what}" for what in ("resuming from the last commit", "SIGKILL") if what in told]
        found = counted(lines, size)
        if found["lost"]:
            faults.append(f"{found['lost']} steps were lost")
        if faults:
            faults.append(end_of_output(folder))
        del found["join_s"]
        return {"faults": faults, "sent": sent, "left": left, "late": late, **found}


def ask(process: subprocess.Popen[bytes], folder: Path, size: int, random: Random) -> tuple[int, float]:
    """Ask ranks that train to leave, but the spared one; return how many, and when the last one was asked."""
    until_s = time.monotonic() + DEADLINE_S
    while not all((folder / f"in-{rank}").exists() for rank in range(size)):
        if process.poll() is not None or time.monotonic() > until_s:
            return 0, 0.0
        time.sleep(0.01)
    spared, asked, sent, last_s = random.randrange(size), set[int](), 0, 0.0
    while sent < MOST_SIGNALS and process.poll() is None and time.monotonic() < until_s:
        time.sleep(random.choice(PAUSES_S))
        # A newcomer that is not in yet has no state, and ends by the signal; so only ranks that train are asked.
        log = folder / "log"
        began = {int(line.split()[1]) for line in log.read_text().splitlines()} if log.exists() else set[int]()
        alive = sorted(began - asked - {spared})
        for victim in random.sample(alive, min(len(alive), random.choice((1, 1, 2)))):
            asked.add(victim)
            sent += send(int((folder / f"pid-{victim}").read_text()), signal.SIGTERM)
            last_s = time.time()
        if not alive:
            time.sleep(0.1)
    return sent, last_s


if __name__ == "__main__":
    sys.exit(main())
