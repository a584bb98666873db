"""Kill, cut off and freeze random ranks and hosts of jobs on 1 to 4 virtual hosts with sshd, in which newcomers come.

    python benchmarks/evidence/growing/hosts.py [--seconds 1800] [--seed 0] [--only PATTERN] [--results FILE]

Each job has 2 to 8 ranks, which `multiring run --hosts` starts by ssh, and which train with NumPy, or in a third of the
jobs with torch; half of the jobs let newcomers in. At random times a rank is killed, all processes of a host are
killed, a host is cut off from the others and joined again, a host is frozen and thawed, or a rank is frozen. The first
host, which has the launcher, and one of its ranks are spared. The job must end well. Its weights must equal, to 1e-10,
those of the same steps in one process, with as many ranks at each step. No committed step may be lost, no step may be
committed by two parts with different numbers of ranks, and no process may be left on any host. The results file has a
line for each job; a further run goes on with the next seed. It needs root and sshd.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))  # lets this script import from the repository root

from benchmarks.evidence.growing.main import faults_in
from benchmarks.evidence.shrinking.main import KILLED, RANK, is_late, results_of_jobs
from benchmarks.evidence.support.claims import commit, machine
from tests.support.ssh_hosts import RUN, SshHosts, ssh_hosts

from multiring.lab import parse_fault

STEPS, DEADLINE_S, END_S = 240, 300.0, 60.0
PAUSES_S = (0.0, 0.05, 0.3, 1.0, 3.0)
MOST_ACTS = 5
WEIGHTS = {"rank killed": 6, "host killed": 4, "host cut off": 2, "host frozen": 1, "rank frozen": 1}
MEND = {"host cut off": ("cut", "mend"), "host frozen": ("freeze", "thaw")}


def main() -> int:
    """Run jobs, and print a table; return 1 if a job was wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", help="regular expression that selects what is done to the jobs")
    done = results_of_jobs(parser, Path("build/growing-hosts.jsonl"), job)
    print(
        f"# Ranks and hosts that come and go, {time.strftime('%Y-%m-%d %H:%M')}\n\n"
        f"`{' '.join(sys.argv)}` at commit {commit()}, {machine()}\n"
    )
    print(f"| jobs | wrong | {' | '.join(WEIGHTS)} | newcomers | steps lost | load |\n|{'---|' * (len(WEIGHTS) + 5)}")
    wrong = sum(bool(row["faults"]) for row in done)
    counts = [sum(row["acts"].get(name, 0) for row in done) for name in WEIGHTS]
    more = [sum(row["joins"] for row in done), sum(row["lost"] for row in done), f"{os.getloadavg()[0]:.0f}"]
    print("|", " | ".join(map(str, [len(done), wrong, *counts, *more])), "|\n")
    print("| next step after | acts | median | longest |\n|---|---|---|---|")
    for name in WEIGHTS:
        times = sorted(took for row in done for kind, took in row["next_step_s"] if kind == name)
        if times:
            print(f"| {name} | {len(times)} | {times[len(times) // 2]:.2f} s | {times[-1]:.2f} s |")
    return 1 if wrong else 0


def job(arguments: argparse.Namespace, seed: int, _engine: str, kind: str) -> dict[str, Any]:
    """Run a job; return what was done to it, and what was wrong."""
    random = Random(seed)  # noqa: S311 -- no secret
    weights = {name: weight for name, weight in WEIGHTS.items() if re.search(arguments.only, name)}
    if not weights:
        raise SystemExit(f"--only {arguments.only!r} selects none of {', '.join(WEIGHTS)}")
    count = random.randint(1 if any(name.startswith("rank") for name in weights) else 2, 4)
    slots = [random.randint(1, 8 // count) for _ in range(count)]
    slots[0] += sum(slots) == 1
    grows = random.random() < 0.5
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        folder = Path(name)
        shared = folder / "shared"
        shared.mkdir()
        for each, mode in ((folder, 0o755), (shared, 0o777)):
            each.chmod(mode)
        with ssh_hosts(count, folder) as hosts:
            return Disturbed(hosts, shared, random, weights).run(slots, kind, grows=grows)


class Disturbed:
    """A job on some hosts, to which things are done.

    Args:
        hosts: the hosts.
        folder: a folder that all hosts see.
        random: draws what is done.
        weights: how often each thing is done, by its name.
    """

    def __init__(self, hosts: SshHosts, folder: Path, random: Random, weights: Mapping[str, int]) -> None:
        self._hosts, self._folder, self._random, self._weights = hosts, folder, random, weights
        self._acts: list[tuple[float, str]] = []
        self._mend_at: dict[int, tuple[float, str]] = {}  # host -> when to mend it, and how
        self._touched: set[int] = set()  # processes that were killed or frozen

    def run(self, slots: Sequence[int], kind: str, *, grows: bool) -> dict[str, Any]:
        """Run the job with so many ranks on the hosts."""
        size = sum(slots)
        steps, pause_s = (STEPS, 0.04) if kind == "numpy" else (2 * STEPS, 0.05)
        stall_s = "4" if kind == "numpy" else "30"  # ranks that import torch set their optimizers up at different times
        places = ",".join(f"host{number}:{count}" for number, count in enumerate(slots))
        more = ["--max-ranks", str(size)] if grows else []
        words = [*RUN, "--hosts", places, "--min-ranks", "1", *more, str(RANK), str(self._folder)]
        process = self._hosts.start(
            0, [*words, str(steps), str(pause_s), kind], MULTIRING_STALL_TIMEOUT_S=stall_s, MULTIRING_STALL_WARN_S="2",
            MULTIRING_WIRE_TIMEOUT_S="10",
        )  # fmt: skip
        faults: list[str] = []
        try:
            self._disturb(process, size, grows=grows)
            output, told = process.communicate(timeout=DEADLINE_S)
            code = process.returncode
        except subprocess.TimeoutExpired:
            process.terminate()
            output, told = process.communicate(timeout=DEADLINE_S)
            code, faults = 0, ["it hangs"]
        for number in list(self._mend_at):
            self._mend(number)
        log = self._folder / "log"
        lines = [line.split() for line in log.read_text().splitlines()] if log.exists() else []
        last_s = self._acts[-1][0] if self._acts else 0.0
        if code == KILLED and is_late(lines, last_s, steps):
            code = 0
        faults += faults_in(self._folder, steps, code) + torn_steps(lines)
        left = {number: gone for number in range(len(slots)) if (gone := self._left_on(number))}
        faults += [f"left on host {number}: {gone}" for number, gone in left.items()]
        if faults:
            faults += [repr(self._acts), output.decode()[-2000:], told.decode()[-8000:]]
        begins = [(float(at), int(born), int(step)) for at, born, how, step, _ in lines if how == "begin"]
        commits = [(float(at), int(step)) for at, _, how, step, _ in lines if how == "commit"]
        lost = [max((done for when, done in commits if when < at), default=0) - step for at, _, step in begins]
        return {
            "hosts": len(slots),
            "ranks": size,
            "faults": faults,
            "acts": Counter(name for _, name in self._acts),
            "joins": len({born for _, born, _ in begins if born >= size}),
            "lost": max([0, *lost]),
            "next_step_s": list(self._times(begins, commits)),
        }

    def _times(
        self, begins: Sequence[tuple[float, int, int]], commits: Sequence[tuple[float, int]]
    ) -> list[tuple[str, float]]:
        """Return how long it took from each act to the next step of those left, if no other act came between."""
        times = []
        for number, (at, name) in enumerate(self._acts):
            until = self._acts[number + 1][0] if number + 1 < len(self._acts) else float("inf")
            begun = min((when for when, _, _ in begins if when > at), default=None)
            after = min((when for when, _ in commits if begun is not None and when > begun), default=None)
            if after is not None and after <= until:
                times.append((name, after - at))
        return times

    def _disturb(self, process: "subprocess.Popen[bytes]", size: int, *, grows: bool) -> None:
        until_s = time.monotonic() + DEADLINE_S
        while not all((self._folder / f"in-{rank}").exists() for rank in range(size)):
            if process.poll() is not None or time.monotonic() > until_s:
                return
            time.sleep(0.01)
        time.sleep(1.0)
        count = len(self._hosts.lab.hosts)
        for _ in range(MOST_ACTS if grows else min(MOST_ACTS, size - 1)):
            self._wait(self._random.choice(PAUSES_S))
            if process.poll() is not None:
                return
            name = self._random.choices(list(self._weights), list(self._weights.values()))[0]
            free = [number for number in range(1, count) if number not in self._mend_at]
            if name.startswith("rank"):
                self._do_to_rank(name, grows=grows)
            elif free:
                self._do_to_host(name, self._random.choice(free))
        while self._mend_at and process.poll() is None:
            self._wait(0.1)

    def _wait(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while True:
            for number, (at, _) in list(self._mend_at.items()):
                if time.monotonic() >= at:
                    self._mend(number)
            if time.monotonic() >= until:
                return
            time.sleep(0.02)

    def _do_to_rank(self, name: str, *, grows: bool) -> None:
        there = [int(each.name.partition("-")[2]) for each in self._folder.glob("host-*")]
        born = [each for each in there if each and each not in self._touched]
        if not born or (name == "rank frozen" and not grows and len(born) < 2):
            return
        victim = self._random.choice(sorted(born))
        pid, host = (self._folder / f"host-{victim}").read_text().split()
        number = int(host.removeprefix("host"))
        if number in self._mend_at:
            return
        self._touched.add(victim)
        sign = signal.SIGKILL if name == "rank killed" else signal.SIGSTOP
        told = self._hosts.as_root(self._hosts.lab.hosts[number], f"kill -{sign.value} {pid} && echo done; true")
        if "done" in told:
            self._acts.append((time.time(), name))

    def _do_to_host(self, name: str, number: int) -> None:
        if name == "host killed":
            self._hosts.as_root(self._hosts.lab.hosts[number], "pkill -9 -u 61234; true")
        else:
            self._hosts.lab.apply(parse_fault([MEND[name][0], f"host{number}"], self._hosts.lab.plan))
            self._mend_at[number] = time.monotonic() + self._random.choice((3.0, 10.0, 20.0, 30.0)), MEND[name][1]
        self._acts.append((time.time(), name))

    def _mend(self, number: int) -> None:
        _, how = self._mend_at.pop(number)
        self._hosts.lab.apply(parse_fault([how, f"host{number}"], self._hosts.lab.plan))

    def _left_on(self, number: int) -> list[str]:
        """Return the processes of the job that are left on a host. That of sshd may not know that its wire was cut."""
        until = time.monotonic() + END_S
        while left := [each for each in self._hosts.processes_of_user(number) if "python" in each]:
            if time.monotonic() > until:
                return left
            time.sleep(0.2)
        return []


def torn_steps(lines: Sequence[Sequence[str]]) -> list[str]:
    """Return what says that two parts of the job went on: a step that was committed with different numbers of ranks."""
    sizes_of: dict[int, set[int]] = {}
    for _, _, kind, step, size in lines:
        if kind == "commit":
            sizes_of.setdefault(int(step), set()).add(int(size))
    torn = {step: sizes for step, sizes in sizes_of.items() if len(sizes) > 1}
    return [f"steps of two parts, with their numbers of ranks: {torn}"] if torn else []


if __name__ == "__main__":
    sys.exit(main())
