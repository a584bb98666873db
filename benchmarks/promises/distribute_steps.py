"""Measure what `distribute` adds to small training steps, of a perceptron on digits, by turns.

    python benchmarks/promises/distribute_steps.py [--ranks 1,2] [--rounds 9] [--steps 300]

Every rank is a process with one thread of torch. These steps take turns in each round:

- memory: a plain step, with a batch that stays in memory. Several ranks do this side by side, unconnected;
- optimizer: the same with a DistributedOptimizer, which sums the gradients of the ranks;
- fed: a step of `distribute` with a new batch of its `multiring.torch.DataLoader`;
- torch: a plain step with a new batch of torch's DataLoader;
- distributed: a step of `distribute` with a new batch of its loader, which was torch's.

A global batch has 128 images, and each rank has its part of them, also in the plain steps. A round's time is that of
the slowest rank. The share of a step is the time of the plain step divided by that of the other one in the same round.
The table shows medians with intervals of 95 %. "CPU" is the processor time of all threads of a rank. The exit code is 1
if `fed` reaches less than 0.97 of the step in memory on one rank. Run this on a quiet machine.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # lets this script import from the repository root

import torch
from benchmarks.evidence.support.claims import commit, machine
from benchmarks.promises.data_training import digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import multiring.torch as mt
from multiring._bench.statistics import median_interval, ratio_interval
from multiring._settings import inherited_environment
from multiring.data import Dataset

FLOOR = 0.97
BATCH = 128
BESIDE = {
    "optimizer": "memory",
    "fed": "memory",
    "distributed": "torch",
}  # a kind, and the plain step it is compared to
KINDS = ("memory", "optimizer", "fed", "torch", "distributed")
Step = Callable[[], None]


@dataclass(slots=True)
class Turn:
    """The seconds and the CPU seconds of a step."""

    wall_s: float
    cpu_s: float


# ---- a rank --------------------------------------------------------------------------------


def model_and_optimizer() -> tuple[nn.Module, Any]:
    """Return a perceptron and its optimizer, the same in each process."""
    torch.manual_seed(1)
    layers = (nn.Flatten(), nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    model = nn.Sequential(*layers)
    return model, torch.optim.SGD(model.parameters(), 0.01)


def train(model: nn.Module, optimizer: Any, images: Tensor) -> None:
    """Take a step. The labels come from the mean of the images, because only the time matters."""
    labels = images.flatten(1).mean(1).mul(1000).long() % 10
    loss = nn.functional.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]  # torch's own
    optimizer.step()


def forever(loader: Any) -> Iterator[Any]:
    """Yield batches, epoch after epoch."""
    while True:
        yield from loader


def steps_on(pack: Path) -> dict[str, Step]:
    """Return a function for each kind, which takes its next step."""
    data = Dataset(pack, seed=1)
    images = torch.stack([torch.from_numpy(data.sample(number)["array"]) for number in range(len(data))])
    own = BATCH // mt.size()
    fixed = images[:own].clone()
    made: dict[str, Step] = {}

    def in_memory(model: nn.Module, optimizer: Any) -> Step:
        return lambda: train(model, optimizer, fixed)

    def fed_by(loader: Any, model: nn.Module, optimizer: Any, images_of: Callable[[Any], Tensor]) -> Step:
        batches = forever(loader)
        return lambda: train(model, optimizer, images_of(next(batches)))

    made["memory"] = in_memory(*model_and_optimizer())
    model, optimizer = model_and_optimizer()
    made["optimizer"] = in_memory(model, mt.DistributedOptimizer(optimizer, model.named_parameters()))
    model, optimizer, loader = mt.distribute(
        *model_and_optimizer(), mt.DataLoader(data, BATCH, workers=1, drop_last=True)
    )
    made["fed"] = fed_by(loader, model, optimizer, lambda batch: batch["array"])
    plain = DataLoader(TensorDataset(images), own, shuffle=True, drop_last=True)
    made["torch"] = fed_by(plain, *model_and_optimizer(), lambda batch: batch[0])
    shared = DataLoader(TensorDataset(images), BATCH, shuffle=True, drop_last=True)
    model, optimizer, dealt = mt.distribute(*model_and_optimizer(), shared)
    made["distributed"] = fed_by(dealt, model, optimizer, lambda batch: batch[0])
    return made


def worker(pack: Path, rounds: int, steps: int) -> None:
    """Measure all kinds by turns; rank 0 prints the slowest rank's times of each round."""
    torch.set_num_threads(1)
    mt.init()
    found = steps_on(pack)
    for step in found.values():
        for _ in range(20):
            step()
    for number in range(rounds):
        for kind in (*KINDS[number % len(KINDS) :], *KINDS[: number % len(KINDS)]):
            step = found[kind]
            step()
            mt.barrier()
            began, cpu = time.perf_counter(), time.process_time()
            for _ in range(steps):
                step()
            own = torch.tensor([[time.perf_counter() - began, time.process_time() - cpu]], dtype=torch.float64) / steps
            slowest = mt.allgather(own).max(0).values.tolist()
            if mt.rank() == 0:
                print("TURN " + json.dumps([kind, *slowest]), flush=True)
    mt.shutdown()


# ---- the measurement -----------------------------------------------------------------------


def measured(ranks: int, pack: Path, rounds: int, steps: int) -> dict[str, list[Turn]]:
    """Run the ranks, and return the turns of each kind."""
    command = [sys.executable, __file__, "--worker", str(pack), "--rounds", str(rounds), "--steps", str(steps)]
    if ranks > 1:
        command = [sys.executable, "-m", "multiring", "run", "-n", str(ranks), "--", *command]
    done = subprocess.run(  # noqa: S603 -- our own command
        command, env=inherited_environment(), capture_output=True, text=True, check=False
    )
    found: dict[str, list[Turn]] = {kind: [] for kind in KINDS}
    for kind, wall_s, cpu_s in map(json.loads, re.findall(r"TURN (.+)", done.stdout)):
        found[kind].append(Turn(wall_s, cpu_s))
    if done.returncode or {len(turns) for turns in found.values()} != {rounds}:
        raise SystemExit(f"the ranks failed:\n{done.stdout}\n{done.stderr}")
    return found


def main() -> int:
    """Print a table for each number of ranks; return 1 if the floor is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="1,2", help="numbers of ranks, separated by commas")
    parser.add_argument("--rounds", type=int, default=9, help="rounds of turns (9)")
    parser.add_argument("--steps", type=int, default=300, help="steps of a turn (300)")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        worker(arguments.worker, arguments.rounds, arguments.steps)
        return 0
    print(f"# Small steps by `distribute`, {time.strftime('%Y-%m-%d %H:%M')}\n")
    words = " ".join(["python", *sys.argv])
    print(f"`{words}` at commit {commit()}, {machine()}, load {os.getloadavg()[0]:.1f}\n", flush=True)
    print("| ranks | step | ms | CPU ms | share of the plain step |\n|---|---|---|---|---|", flush=True)
    is_missed = False
    with tempfile.TemporaryDirectory() as folder:
        digits(Path(folder))
        for ranks in map(int, arguments.ranks.split(",")):
            found = measured(ranks, Path(folder) / "pack", arguments.rounds, arguments.steps)
            for kind, turns in found.items():
                wall_s = median_interval([each.wall_s for each in turns])
                cpu_s = median_interval([each.cpu_s for each in turns])
                share = ""
                if kind in BESIDE:
                    plain = [each.wall_s for each in found[BESIDE[kind]]]
                    ratio = ratio_interval(plain, [each.wall_s for each in turns])
                    share = f"{ratio.middle:.1%} of {BESIDE[kind]} ({ratio.low:.1%} to {ratio.high:.1%})"
                    is_missed |= ranks == 1 and kind == "fed" and ratio.middle < FLOOR
                print(
                    f"| {ranks} | {kind} | {1e3 * wall_s.middle:.3f} | {1e3 * cpu_s.middle:.3f} | {share} |", flush=True
                )
    return int(is_missed)


if __name__ == "__main__":
    sys.exit(main())
