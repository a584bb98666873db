"""Check that each byte leaves the source once, for any number of hosts.

    sudo .venv/bin/python benchmarks/evidence/data/main.py [--megabytes 200] [--hosts 4,8] [--runs 3]

The test stages a pack on the hosts of a lab. For comparison, each host also stages the pack for itself (mode `each`).
The last host of the lab is the source, an HTTP server with a slowed link. The other hosts stage the pack from it, each
into its own memory (every host has its own /dev/shm). The server counts the payload bytes and requests; the kernel
counts the bytes of the server's interface. The bound is max(D/s, D/min d, H D/(s + sum u)). Its rates are measured
beforehand with plain sockets in the same lab. The exit code is 1 if the source sent more than 1.005 times the data, or
if staging took more than 1 / 0.9 of the bound.
"""

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[3]))  # lets this script import from the repository root

from benchmarks.evidence.support.claims import commit, machine

from multiring._settings import inherited_environment
from multiring.data import Dataset
from multiring.data.packing.writing import PackOptions, pack

RANK = Path(__file__).with_name("rank.py")
JOB_S = 900.0
MOST_SENT, LEAST_OF_BOUND = 1.005, 0.90
SAMPLE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Case:
    """A lab: the links of the hosts, of the source and, if any, of a slow host."""

    link: str
    source: str
    slow: str = ""


CASES = (Case("1gbit", "200mbit"), Case("250mbit", "1gbit", "100mbit"))


def main() -> int:
    """Print a table for each case; return 1 if a floor was missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=200, help="size of the data set (200)")
    parser.add_argument("--hosts", default="4,8", help="numbers of hosts, separated by commas (4,8)")
    parser.add_argument("--runs", type=int, default=3, help="runs of each case (3)")
    arguments = parser.parse_args()
    print(f"# Read once, {time.strftime('%Y-%m-%d %H:%M')}\n")
    print(f"`{shlex.join(['python', *sys.argv])}` at commit {commit()}, {machine()}\n", flush=True)
    missed = False
    with tempfile.TemporaryDirectory() as folder:
        size = made(Path(folder), arguments.megabytes)
        for case in CASES:
            slow = f", host0 {case.slow}" if case.slow else ""
            print(f"## Hosts {case.link}{slow}, source {case.source}, {size} bytes\n")
            print("| hosts | mode | sent / data | requests | interface / data | s | bound s | of bound |")
            print("|---|---|---|---|---|---|---|---|", flush=True)
            for hosts in map(int, arguments.hosts.split(",")):
                missed |= not measured(case, hosts, Path(folder) / "pack", size, arguments.runs)
            print()
    return int(missed)


def made(folder: Path, megabytes: int) -> int:
    """Create a pack of samples of 1 MiB; return its size in bytes."""
    (folder / "d").mkdir()
    for number in range(megabytes * 10**6 // SAMPLE_BYTES + 1):
        array = np.random.default_rng(number).integers(0, 255, SAMPLE_BYTES, dtype=np.uint8)
        np.save(folder / "d" / f"{number:05}.npy", array)
    data = Dataset(str(folder / "d"), format="npy-files", shuffle="none")
    return pack(data.source, len(data), folder / "pack", PackOptions(), lambda *_: None).size_bytes


def measured(case: Case, hosts: int, folder: Path, size: int, runs: int) -> bool:
    """Print the rows for a number of hosts; return whether the floors hold."""
    holds = True
    for mode in ("once", "each"):
        found = [job(case, hosts, folder, mode) for _ in range(runs)]
        seconds = statistics.median(each["seconds"] for each in found)
        sent, requests, passed = (max(each[name] for each in found) for name in ("sent", "requests", "interface"))
        up = found[0]["rates"]  # the rate of the source, then of each host; measured with plain sockets
        bound = max(size / up[0], size / min(up[1:]), hosts * size / sum(up))
        share = bound / seconds
        row = (hosts, mode, f"{sent / size:.4f}", requests, f"{passed / size:.3f}", f"{seconds:.2f}", f"{bound:.2f}")
        print(f"| {' | '.join(map(str, row))} | {share:.1%} |", flush=True)
        if mode == "once":
            holds &= sent <= MOST_SENT * size and share >= LEAST_OF_BOUND
    return holds


def job(case: Case, hosts: int, folder: Path, mode: str) -> dict[str, Any]:
    """Run one lab; return the result that its source reports."""
    faults = [("0.1", f"slow host{hosts} {case.source}")]
    faults += [("0.1", f"slow host0 {case.slow}")] if case.slow else []
    lab = [sys.executable, "-m", "multiring", "lab", "--hosts", str(hosts + 1), "--link", case.link]
    for seconds, fault in faults:
        lab += ["--at", seconds, fault]
    command = [*lab, "--", sys.executable, str(RANK), str(folder), mode]
    environment = {**inherited_environment(), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(  # noqa: S603 -- our own command
        command, env=environment, capture_output=True, text=True, timeout=JOB_S, check=False
    )
    lines = [line.partition("RESULT ")[2] for line in done.stdout.splitlines() if "RESULT " in line]
    if done.returncode or len(lines) != 1:
        raise SystemExit(f"a job failed with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    result: dict[str, Any] = json.loads(lines[0])
    return result


if __name__ == "__main__":
    sys.exit(main())
