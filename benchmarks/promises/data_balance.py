"""Check whether the balance line names the stage whose speed-up helps most.

    python benchmarks/promises/data_balance.py [--severities 10] [--first 0] [--steps 24]

The program runs short trainings on two ranks over a loopback with a limited rate, so it needs root and Linux. Rank 0
reads through a slow source and a slow disk, which serve one read at a time. It decodes on its cores, simulates an
accelerator's computation, and sums gradients with rank 1. Rank 1 does nothing else.

One of six limits is slowed by a random factor: source, disk, decode, compute, wire, or the number of workers. Then the
same training runs with each of the six doubled in turn, which measures the true limit. The balance line is right if it
names the stage whose doubling made the training fastest, or a stage within 3 % of the fastest.
"""

import argparse
import hashlib
import json
import os
import random
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))  # lets this script import from the repository root

from benchmarks.evidence.support.claims import commit, machine

import multiring
from multiring._settings import inherited_environment
from multiring.data import Dataset, Loader
from multiring.data.balance.watching import BalanceWatch
from multiring.data.readers.storage import LocalStorage
from multiring.data.stages import DISK, SOURCE

if TYPE_CHECKING:
    from multiring.data.stages import StageClock

BATCH, SAMPLES = 8, 4096
STAGES = ("source", "disk", "decode", "compute", "wire", "workers")
WITHIN = 1.03  # the times of equal trainings of one second differ by up to this factor
GRADIENT_BYTES = 1 << 19
INNER = "--inner"


@dataclass(frozen=True, slots=True)
class Speeds:
    """The milliseconds per step of each stage by itself, and the number of workers.

    The time to decode is that of one core.
    """

    source: float
    disk: float
    decode: float
    compute: float
    wire: float
    workers: int

    def doubled(self, stage: str) -> "Speeds":
        """Return the speeds with one stage twice as fast."""
        if stage == "workers":
            return replace(self, workers=2 * self.workers)
        return replace(self, **{stage: getattr(self, stage) / 2})


def seeded(stage: str, number: int) -> Speeds:
    """Return the speeds of a training that `stage` limits, with a random severity."""
    draw = random.Random(f"{stage} {number}")  # noqa: S311 -- of a benchmark
    if stage == "workers":
        # Here no stage is slow by itself, so a second worker would halve the time of a step.
        source, disk, decode = (draw.uniform(6, 14) * draw.uniform(1, 2) for _ in range(3))
        compute, wire = draw.uniform(2, 6), draw.uniform(2, 4)
        return Speeds(source=source, disk=disk, decode=decode, compute=compute, wire=wire, workers=1)
    parts = {each: draw.uniform(2, 6) for each in STAGES[:5]}
    parts[stage] *= draw.uniform(4, 10)
    return Speeds(**parts, workers=2)


class Tier:
    """A storage with a disk cache in front of a source.

    Each of the two serves one read at a time, at its rate.
    """

    def __init__(self, folder: str) -> None:
        self._files = LocalStorage(folder)
        self.url, self.names, self.size = self._files.url, self._files.names, self._files.size
        self.stage = DISK
        self.speeds = Speeds(0, 0, 0, 0, 0, 1)
        self._turns = {SOURCE: threading.Lock(), DISK: threading.Lock()}
        self.clock: StageClock | None = None

    def read_into(self, name: str, begin: int, out: memoryview) -> None:
        """Read bytes of a file as slowly as the source and the disk allow."""
        if self.clock is not None:
            with self.clock.request(SOURCE), self._turns[SOURCE]:
                time.sleep(self.speeds.source / BATCH / 1e3)
        with self._turns[DISK]:
            time.sleep(self.speeds.disk / BATCH / 1e3)
        self._files.read_into(name, begin, out)


class Decode:
    """A transform that keeps a core busy with hashing while other threads run."""

    def __init__(self, rounds_per_ms: float) -> None:
        self.rounds_per_ms = rounds_per_ms
        self.milliseconds = 0.0

    def __call__(self, record: dict[str, Any], _: np.random.Generator) -> dict[str, Any]:
        """Spend the time, and return the record unchanged."""
        rounds = int(self.rounds_per_ms * self.milliseconds / BATCH)
        if rounds:
            hashlib.pbkdf2_hmac("sha256", b"decode", b"salt", rounds)
        return record


def rounds_per_ms() -> float:
    """Return the number of hash rounds that a core does per millisecond."""
    best = 0.0
    for _ in range(5):
        began = time.perf_counter()
        hashlib.pbkdf2_hmac("sha256", b"decode", b"salt", 20000)
        best = max(best, 20000 / (time.perf_counter() - began) / 1e3)
    return best


def set_wire(milliseconds: float) -> None:
    """Limit the loopback so that a step's gradients take `milliseconds`, both ways."""
    bits = round(2 * GRADIENT_BYTES * 8 / milliseconds * 1e3)
    words = f"tc qdisc replace dev lo root tbf rate {bits}bit burst 32kb limit 8mb"
    subprocess.run(words.split(), check=True)  # noqa: S603 -- our own words


def trained(data: Dataset, parts: tuple[Tier, Decode], speeds: Speeds, steps: int) -> tuple[float, Any]:
    """Run a training on rank 0; return the seconds per step and the balance."""
    tier, decode = parts
    tier.speeds, decode.milliseconds = speeds, speeds.decode
    set_wire(speeds.wire)
    group = multiring.world()
    gradients = np.ones(GRADIENT_BYTES // 4, np.float32)
    loader = Loader(data, BATCH, workers=speeds.workers)
    watch, began = None, 0.0
    group.broadcast(np.array([steps + 4]), root=0)
    for number, _ in zip(range(steps + 4), loader, strict=False):
        if number == 3:  # the batches that were made ahead are used up
            watch, began = BalanceWatch(loader), time.perf_counter()
        time.sleep(speeds.compute / 1e3)
        group.all_reduce(gradients)
    took = (time.perf_counter() - began) / (steps + 1)
    assert watch is not None
    balance = watch.finish()
    loader.close()
    return took, balance


def inner(arguments: argparse.Namespace) -> None:
    """Run one rank of the trainings; rank 0 prints a line for each case."""
    multiring.init()
    group = multiring.world()
    os.sched_setaffinity(0, range(os.cpu_count() or 1))  # Rank 1 only sums gradients, so rank 0 may use all cores.
    if multiring.rank() == 1:
        gradients = np.ones(GRADIENT_BYTES // 4, np.float32)
        steps = np.array([0])
        while group.broadcast(steps, root=0) is None and steps[0]:
            for _ in range(steps[0]):
                group.all_reduce(gradients)
        return
    with tempfile.TemporaryDirectory() as folder:
        np.save(f"{folder}/a.npy", np.zeros((SAMPLES, 256), np.float32))
        tier, decode = Tier(folder), Decode(rounds_per_ms())
        data = Dataset(tier, transform=decode)
        tier.clock = data.clock
        for stage in arguments.limits.split(","):
            for number in range(arguments.first, arguments.first + arguments.severities):
                speeds = seeded(stage, number)
                took, balance = trained(data, (tier, decode), speeds, arguments.steps)
                gains = {
                    each: took / trained(data, (tier, decode), speeds.doubled(each), arguments.steps)[0]
                    for each in STAGES
                }
                told = {"seeded": stage, "speeds": asdict(speeds), "step_ms": 1e3 * took, "gains": gains}
                print("CASE " + json.dumps({**told, "told": balance.bound, "line": str(balance)}), flush=True)
    group.broadcast(np.array([0]), root=0)


def main() -> int:
    """Print a row for each case; return 1 if fewer than 9 in 10 were right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--severities", type=int, default=10, help="severities of each limit (10)")
    parser.add_argument("--first", type=int, default=0, help="number of the first severity (0)")
    parser.add_argument("--limits", default=",".join(STAGES), help="limits to test, separated by commas (all)")
    parser.add_argument("--steps", type=int, default=24, help="steps of a training (24)")
    parser.add_argument(INNER, action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inner:
        inner(arguments)
        return 0
    print(f"# The balance line, {time.strftime('%Y-%m-%d %H:%M')}\n")
    print(f"`{shlex.join(['python', *sys.argv])}` at commit {commit()}, {machine()}\n", flush=True)
    ranks = [sys.executable, "-m", "multiring", "run", "-n", "2", sys.executable, *sys.argv, INNER]
    inside = f"ip link set lo mtu 1500 up && exec {shlex.join(ranks)}"
    done = subprocess.run(  # noqa: S603 -- our own command
        ["unshare", "-n", "sh", "-c", inside],  # noqa: S607
        env={**inherited_environment(), "MULTIRING_ENGINE": "tcp"},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    cases = [json.loads(line.partition("CASE ")[2]) for line in done.stdout.splitlines() if "CASE {" in line]
    print("| seeded | ms a step | doubling helps most | told | right |\n|---|---|---|---|---|")
    right = 0
    for case in cases:
        best = max(case["gains"], key=case["gains"].get)
        told = case["gains"].get(case["told"], 0.0)
        is_right = told * WITHIN >= case["gains"][best]
        right += is_right
        note = "yes" if is_right else f"no: {told:.2f}"
        row = (case["seeded"], f"{case['step_ms']:.1f}", f"{best} ({case['gains'][best]:.2f})", case["told"], note)
        print(f"| {' | '.join(row)} |")
    limits = arguments.limits.split(",")
    wanted = len(limits) * arguments.severities
    print(f"\n{right} of {wanted} right")
    for stage in limits:
        print(next((f"- {stage}: {each['line']}" for each in cases if each["seeded"] == stage), f"- {stage}: none"))
    return int(done.returncode or right < 0.9 * wanted)


if __name__ == "__main__":
    sys.exit(main())
