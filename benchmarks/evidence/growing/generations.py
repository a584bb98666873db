"""Change the ranks of one job many times, and watch memory, threads and descriptors.

    python benchmarks/evidence/growing/generations.py [--generations 200] [--seed 0] [--why]

A job of three ranks trains on this host. One rank of the start is spared; of the others one is killed, or gets SIGTERM,
and a newcomer replaces it, until the spared rank has been in so many generations. After each change it writes down
its resident memory, threads and descriptors, and so does this program for the launcher. From the tenth generation on,
the memory must stay within 5 %, and the usual numbers must be those of the first ten. With --why the spared rank tells
what has grown since the tenth: Python's memory by line, the numbers of objects by type, and the C library's memory.
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
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[3]))  # lets this script import from the repository root

from benchmarks.evidence.growing.usage import Usage, usage_of
from benchmarks.evidence.support.claims import commit, machine

from multiring._settings import inherited_environment

RANK, RANKS, FIRST, MOST = Path(__file__).with_name("generations_rank.py"), 3, 10, 1.05
PATIENCE_S = 120.0


def main() -> int:
    """Run the job, and print a table; return 1 if something grew."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--generations", type=int, default=200, help="how many generations to see")
    parser.add_argument("--seed", type=int, default=0, help="whom to end, and how")
    parser.add_argument("--why", action="store_true", help="tell what has grown; this itself takes memory")
    parser.add_argument("--engine", default="auto", help="MULTIRING_ENGINE of the job")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        words = [
            *(sys.executable, "-m", "multiring", "run", "-n", str(RANKS), "--min-ranks", "1"),
            *("--max-ranks", str(RANKS), "--reset-limit", str(10 * arguments.generations)),
            *(str(RANK), name, *(["--why"] if arguments.why else [])),
        ]
        with (folder / "output").open("wb") as output:
            process = subprocess.Popen(  # noqa: S603 -- our own program
                words,
                env=inherited_environment() | {"MULTIRING_ENGINE": arguments.engine},
                stdout=output,
                stderr=output,
            )
            launcher = changed(process, folder, arguments.generations, Random(arguments.seed))  # noqa: S311 -- no secret
            (folder / "stop").touch()
            try:
                code = process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                process.terminate()
                code = process.wait(PATIENCE_S)
        spared = [usage for _, usage in noted(folder)]
        print(
            f"# Generations of one job, {time.strftime('%Y-%m-%d %H:%M')}\n\n"
            f"`{' '.join(sys.argv)}` at commit {commit()}, {machine()}, load {os.getloadavg()[0]:.0f}\n"
        )
        print("| process | generation | MiB resident | threads | descriptors |\n|---|---|---|---|---|")
        faults = [] if code == 0 else [f"exit code {code}", (folder / "output").read_text()[-6000:]]
        if len(spared) < arguments.generations:
            faults.append(f"{len(spared)} generations: {(folder / 'output').read_text()[-6000:]}")
        for who, usages in (("spared rank", spared), ("launcher", launcher)):
            faults += told_of(who, usages)
        for line in faults:
            print(f"\nMISSED: {line}")
        if arguments.why:
            print((folder / "why").read_text())
    return 1 if faults else 0


def noted(folder: Path) -> list[tuple[int, Usage]]:
    """Return the number of ranks and the spared rank's usage in each generation so far."""
    file = folder / "usage"
    lines = file.read_text().splitlines() if file.exists() else []
    return [(size, Usage(*usage)) for size, usage in map(json.loads, lines)]


def changed(process: subprocess.Popen[bytes], folder: Path, generations: int, random: Random) -> list[Usage]:
    """End ranks until the spared one has seen enough generations; return the launcher's usage after each change."""
    launcher, ended, until_s = list[Usage](), set[int](), time.monotonic() + PATIENCE_S
    seen = 0
    while process.poll() is None and time.monotonic() < until_s:
        found = noted(folder)
        if len(found) > seen:
            seen, until_s = len(found), time.monotonic() + PATIENCE_S
            if len(found) >= generations:
                break
            launcher.append(usage_of(process.pid))
            alive = {int(each.name.partition("-")[2]): each for each in folder.glob("pid-*[0-9]")}
            here = sorted(set(alive) - ended - {0})
            if found[-1][0] == RANKS and here:
                victim = random.choice(here)
                ended.add(victim)
                os.kill(int(alive[victim].read_text()), random.choice((signal.SIGKILL, signal.SIGTERM)))
        time.sleep(0.02)
    return launcher


def told_of(who: str, usages: list[Usage]) -> list[str]:
    """Print some generations of a process; return what grew from the tenth on."""
    for number in sorted({0, FIRST, len(usages) // 4, len(usages) // 2, 3 * len(usages) // 4, len(usages) - 1}):
        if 0 <= number < len(usages):
            each = usages[number]
            print(f"| {who} | {number} | {each.resident / 2**20:.2f} | {each.threads} | {each.descriptors} |")
    first, later = usages[:FIRST], usages[FIRST:]
    if not later:
        return []
    faults, grown = [], max(each.resident for each in later[len(later) // 2 :]) / later[0].resident
    print(f"\n{who}: {100 * (grown - 1):+.1f} % resident memory since generation {FIRST}\n")
    if grown > MOST:
        faults.append(f"{who}: resident memory has grown by {100 * (grown - 1):.1f} %")
    # Threads and descriptors of the former generation may not have ended yet, so single numbers say little.
    for name in ("threads", "descriptors"):
        before, after = (median(getattr(each, name) for each in some) for some in (first, later[len(later) // 2 :]))
        if after > before + 1:
            faults.append(f"{who}: {after} {name} usually, {before} in the first {FIRST} generations")
    return faults


if __name__ == "__main__":
    sys.exit(main())
