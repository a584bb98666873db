"""Run random programs of collectives and compare them with NumPy on every rank.

    sudo .venv/bin/python benchmarks/evidence/jobs/programs.py [--seconds 3600] [--seed N] [--only 'tcp x 3,...']

The places vary hosts, slots, rails, racks and engines. They take turns of a minute, each with the next seed. A failure
is printed with the command that repeats it, and the other places continue. The exit code is 1 if any program failed.
The programs are in tests/support/programs.py.
"""

import argparse
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from types import MappingProxyType

sys.path.insert(0, str(Path(__file__).parents[3]))  # lets this script import from the repository root

from benchmarks.evidence.jobs.job import ROOT
from benchmarks.evidence.support.claims import commit, machine
from tests.support.mpi_ranks import mpi_start

from multiring._bench.variants import VARIANTS
from multiring._settings import environment_of, inherited_environment

TURN_S = 60.0
PATIENCE_S = 240.0  # a place that runs longer than its turn and this time counts as hung
TOLD = 2500  # the number of characters printed of a failure's output
RAILS = ("127.0.0.1", "127.0.0.2", "127.0.0.3")
_RUN = ("-m", "multiring", "run", "-n")


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a program: the command that starts its ranks, and the environment."""

    starter: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(slots=True)
class Tally:
    """The results of a place so far."""

    programs: int = 0
    turns: int = 0
    operations: int = 0
    failures: int = 0


def places() -> Iterator[tuple[str, Place]]:
    """Yield every place with its name.

    Some places need an MPI implementation.
    """
    python = sys.executable
    for ranks in (1, 2, 3, 4, 6):
        yield f"shm x {ranks}", Place((python, *_RUN, str(ranks), "--"))
    # More than 16 ranks do not report to each other all at once. The second of these two places avoids fused kernels
    # and single-copy reads.
    yield "shm x 18", Place((python, *_RUN, "18", "--"))
    yield "shm x 3, move by move", Place((python, *_RUN, "3", "--"), environment_of(lower=False, read_peers=False))
    for ranks in (2, 3, 5):
        for rails in (1, 2, 3):
            variables = environment_of(engine="tcp", rails=",".join(RAILS[:rails]))
            yield f"tcp x {ranks}, {rails} rails", Place((python, *_RUN, str(ranks), "--"), variables)
    for mpi in ("mpich", "openmpi"):
        prefix, found = mpi_start(mpi, 3)
        yield f"{mpi} x 3", Place(tuple(prefix), {**found, **environment_of(engine="mpi")})
    for lab in (
        "--hosts 2 --slots 3 --link 1gbit --rail 1gbit",
        "--hosts 3 --slots 2 --link 1gbit --rail 500mbit",
        "--hosts 4 --slots 1 --link 1gbit --rail 250mbit",
        "--hosts 2 --slots 1 --rail 1gbit --rail 250mbit",
        "--hosts 3 --slots 1",
        "--hosts 4 --slots 2 --rack 2 --uplink 1gbit --link 1gbit",
        "--hosts 4 --slots 1 --rack 2 --uplink 500mbit --link 1gbit --rail 1gbit --rail 500mbit",
        "--hosts 2 --slots 2 --link 100mbit --rail 1gbit",
        "--hosts 3 --slots 3,1,2 --link 1gbit --rail 500mbit",
        "--hosts 4 --slots 4,4,3,1 --link 1gbit",
    ):
        yield lab, Place((python, "-m", "multiring", "lab", *lab.split(), "--"))
    by_mpi = VARIANTS["multiring-mpi"]
    lab = f"--hosts 2 --slots 2 --launcher {by_mpi.launcher}"
    yield lab, Place((python, "-m", "multiring", "lab", *lab.split(), "--"), by_mpi.variables())


def main() -> int:
    """Run programs until the time is used up; return 1 if a program failed."""
    known = dict(places())
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3600.0, help="total time")
    parser.add_argument("--seed", type=int, default=1, help="seed of the first program")
    parser.add_argument("--only", action="append", choices=list(known), metavar="PLACE", help="; ".join(known))
    arguments = parser.parse_args()
    print(f"# Random programs, {time.strftime('%Y-%m-%d %H:%M')}\n")
    print(f"`{shlex.join(['python', *sys.argv])}` at commit {commit()}, {machine()}\n", flush=True)
    tallies = {name: Tally() for name in arguments.only or known}
    turn_s = min(TURN_S, arguments.seconds / len(tallies))
    begin, seed = time.monotonic(), arguments.seed
    for name in cycle(tallies):
        if time.monotonic() - begin > arguments.seconds - turn_s / 2:
            break
        run(name, known[name], seed, turn_s, tallies[name])
        seed += 1
    print("\n| place | programs | turns | operations of rank 0 | failures |\n|---|---|---|---|---|")
    for name, tally in tallies.items():
        print(f"| {name} | {tally.programs} | {tally.turns} | {tally.operations} | {tally.failures} |")
    return 1 if any(tally.failures for tally in tallies.values()) else 0


def run(name: str, place: Place, seed: int, seconds: float, tally: Tally) -> None:
    """Run the program of `seed` at a place; print and count the result."""
    program = (sys.executable, "-m", "tests.support.programs", "--seed", str(seed), "--seconds", f"{seconds:.0f}")
    variables = {
        "OMP_NUM_THREADS": "1",
        **place.variables,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")]),
    }
    command = [*place.starter, *program]
    with subprocess.Popen(  # noqa: S603 -- our own
        command,
        cwd=ROOT,
        env={**inherited_environment(), **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as job:
        try:
            output = job.communicate(timeout=seconds + PATIENCE_S)[0]
        except subprocess.TimeoutExpired:
            os.killpg(job.pid, signal.SIGTERM)
            output = f"{job.communicate()[0]}\nit hung"
    tally.programs += 1
    said = [line for line in output.splitlines() if f"seed {seed}: " in line and line.endswith("all right")]
    if job.returncode == 0 and said:
        words = said[0].rpartition(f"seed {seed}: ")[2].split()
        print(f"{name}, seed {seed}: {' '.join(words)}", flush=True)
        tally.turns += int(words[0])
        tally.operations += int(words[2])
        return
    tally.failures += 1
    settings = shlex.join(f"{key}={text}" for key, text in variables.items())
    print(f"FAILED at {name}, seed {seed}, exit code {job.returncode}; again by\n    {settings} {shlex.join(command)}")
    print(output[-TOLD:], flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
