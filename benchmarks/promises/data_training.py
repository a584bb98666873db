"""Measure the cost of data loading in training.

    python benchmarks/promises/data_training.py [--cases digits,resnet] [--rounds 5] [--seconds 6]

The comparison is a training step with a batch that stays in memory. One process uses torch with one thread less than
there are cores, and one worker that reads and decodes. The case `digits` trains a perceptron on 8 x 8 images from a
pack. The case `resnet` trains a ResNet-26 of width 16 on JPEGs of 500 x 375, cropped to 64.

The bound of a step is the larger of two times. One is the step with the same batch repeatedly. The other is the CPU
time of that step and of making a batch, divided by the cores. The rounds alternate. The table shows the medians and the
share of the bound that loading reaches. Run this on a quiet machine.
"""

import argparse
import os
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2]))  # lets this script import from the repository root

from benchmarks.evidence.support.claims import commit, machine
from benchmarks.promises.data_throughput import made
from examples.imagenet.resnet import LAYERS, ResNet
from sklearn.datasets import load_digits

import multiring.torch as mt
from multiring.data import Dataset, Loader
from multiring.data.augment import RandomCrop
from multiring.data.packing.writing import PackOptions, pack

FLOOR = 0.97
Step = Callable[[dict[str, Any]], None]


def digits(place: Path) -> tuple[Dataset, Step, int]:
    """Return the digits as a pack, a perceptron's training step, and the batch size."""
    images = load_digits().images.astype(np.float32) / 16
    (place / "files" / "a").mkdir(parents=True)
    for number, image in enumerate(images):
        np.save(place / "files" / "a" / f"{number:04}.npy", image)
    files = Dataset(str(place / "files"), format="npy-files", shuffle="none")
    pack(files.source, len(files), place / "pack", PackOptions(), lambda *_: None)
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
    )
    return Dataset(str(place / "pack"), seed=1), step_of(model, "array"), 128


def resnet(place: Path) -> tuple[Dataset, Step, int]:
    """Return JPEGs as a pack, a training step of a small ResNet, and the batch size."""
    made("jpeg", place, 512)
    model = ResNet(LAYERS["resnet26"], 10, width=16, small=True)
    return Dataset(str(place / "pack"), transform=Crop(), seed=1), step_of(model, "image"), 32


class Crop:
    """A random crop of 64 x 64 pixels."""

    def __init__(self) -> None:
        self._crop = RandomCrop(64)

    def __call__(self, record: dict[str, Any], generator: np.random.Generator) -> dict[str, Any]:
        """Return only the crop, as (64, 64, 3) bytes."""
        return {"image": self._crop(record, generator)["image"]}


def step_of(model: nn.Module, field: str) -> Step:
    """Return a function that takes a training step on a batch's field.

    It derives the labels from the mean of the samples, because only the time matters.
    """
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def step(batch: dict[str, Any]) -> None:
        x = batch[field].float()
        if x.ndim == 4:
            x = x.permute(0, 3, 1, 2).div(255)
        labels = x.flatten(1).mean(1).mul(1000).long() % 10
        loss = nn.functional.cross_entropy(model(x), labels)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch's own
        optimizer.step()

    return step


def timed(act: Callable[[], Any], seconds: float) -> tuple[float, float]:
    """Return the wall time and CPU time per call, over calls that take `seconds`."""
    for _ in range(3):
        act()
    began, cpu, calls = time.perf_counter(), time.process_time(), 0
    while time.perf_counter() - began < seconds:
        act()
        calls += 1
    return (time.perf_counter() - began) / calls, (time.process_time() - cpu) / calls


def main() -> int:
    """Print a row for each case; return 1 if a case is below the floor."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="digits,resnet", help="cases to run, separated by commas")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of turns (5)")
    parser.add_argument("--seconds", type=float, default=6.0, help="length of each turn (6)")
    arguments = parser.parse_args()
    print(f"# Training fed, {time.strftime('%Y-%m-%d %H:%M')}\n")
    print(f"`{shlex.join(['python', *sys.argv])}` at commit {commit()}, {machine()}\n")
    print("| case | fed ms | in memory ms | CPU / cores ms | of the bound |\n|---|---|---|---|---|", flush=True)
    cores = os.cpu_count() or 1
    torch.set_num_threads(max(1, cores - 1))
    worst, lines = 1.0, []
    for name in arguments.cases.split(","):
        with tempfile.TemporaryDirectory() as folder:
            data, step, batch = {"digits": digits, "resnet": resnet}[name](Path(folder))
            loader = mt.DataLoader(data, batch, workers=1, drop_last=True)
            rows: list[tuple[float, float, float]] = []
            for _ in range(arguments.rounds):
                fixed = next(iter(loader))
                loader.close()
                memory_s, memory_cpu_s = timed(partial(step, fixed), arguments.seconds)
                making = batches(Loader(data, batch, workers=1, drop_last=True))
                _, made_cpu_s = timed(partial(next, making), arguments.seconds / 3)
                watch, fed = mt.measure_bottleneck(loader), batches(loader)
                fed_s, _ = timed(partial(next_step, step, fed), arguments.seconds)
                lines.append(f"{name}: {watch.finish()}")
                rows.append((fed_s, memory_s, (memory_cpu_s + made_cpu_s) / cores))
            shares = [max(memory_s, cpu_s) / fed_s for fed_s, memory_s, cpu_s in rows]
            share = statistics.median(shares)
            worst = min(worst, share)
            shown = [f"{1e3 * statistics.median(column):.2f}" for column in zip(*rows, strict=True)]
            print(
                f"| {name} | {' | '.join(shown)} | {share:.1%} ({min(shares):.1%} to {max(shares):.1%}) |", flush=True
            )
    print("\n" + "\n".join(f"- {line}" for line in lines))
    return int(worst < FLOOR)


def next_step(step: Step, fed: Any) -> None:
    """Take a step with the next batch."""
    step(next(fed))


def batches(loader: Loader) -> Any:
    """Yield batches, epoch after epoch."""
    while True:
        yield from loader


if __name__ == "__main__":
    sys.exit(main())
