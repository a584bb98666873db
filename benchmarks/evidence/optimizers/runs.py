"""Train many small networks side by side, each on one thread, and record each in a file that a later command continues.

A training's seed decides its first weights, its batches and their order. Its learning rate rises over the first
twentieth of its steps and then falls to zero along a cosine.
"""

import argparse
import hashlib
import json
import math
import multiprocessing
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.evidence.optimizers.workloads import WORKLOADS
from benchmarks.evidence.support.claims import ROOT, commit
from torch import Tensor, nn

import multiring.torch as mt

BETAS = (0.9, 0.99)
WARM_UP = 0.05
EVALUATIONS = 50  # of a whole training
FIRST_EVALUATED = 0.3  # of a whole training
Line = dict[str, Any]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that the programs of this folder have in common."""
    parser.add_argument("--show", action="store_true", help="run nothing; print the recorded results")
    parser.add_argument("--jobs", type=int, default=2, help="trainings side by side, each on one thread")
    parser.add_argument("--device", default="cpu", help="where networks are: cpu or cuda")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "optimizers", help="folder of the records")


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """One training.

    Args:
        workload: a name of WORKLOADS.
        optimizer: "nadamw" or "shampoo".
        part: "tuning" or "judging".
        rate: the highest learning rate.
        decay: the decoupled weight decay.
        horizon: its steps, as a share of the workload's.
        seed: of its weights and batches.
    """

    workload: str
    optimizer: str
    part: str
    rate: float
    decay: float
    horizon: float
    seed: int

    @property
    def name(self) -> str:
        """The name in the record; equal trainings have equal names."""
        numbers = f"rate {self.rate:g} decay {self.decay:g} horizon {self.horizon:g} seed {self.seed}"
        return f"{self.workload} {self.optimizer} {self.part} {numbers}"


def nadamw(parameters: Iterable[Tensor], rate: float, decay: float) -> torch.optim.Optimizer:
    """Return NadamW: Adam with Nesterov's momentum and decoupled decay."""
    # With so high a momentum_decay torch's momentum is beta1 from the first step, as in AlgoPerf's baseline.
    return torch.optim.NAdam(
        parameters, rate, BETAS, weight_decay=decay, momentum_decay=1e6, decoupled_weight_decay=True
    )


def shampoo(parameters: Iterable[Tensor], rate: float, decay: float) -> torch.optim.Optimizer:
    """Return Shampoo with its defaults."""
    return mt.Shampoo(parameters, rate, BETAS, weight_decay=decay)


OPTIMIZERS: Mapping[str, Callable[[Iterable[Tensor], float, float], torch.optim.Optimizer]] = {
    "nadamw": nadamw,
    "shampoo": shampoo,
}


def factor(step: int, steps: int) -> float:
    """Return the share of the highest learning rate in a step, from 0."""
    warm_up = WARM_UP * steps
    if step + 1 <= warm_up:
        return (step + 1) / warm_up
    return 0.5 * (1 + math.cos(math.pi * (step + 1 - warm_up) / (steps + 1 - warm_up)))


def train(training: Training, device: str) -> Line:
    """Train, and return the held-out losses: pairs of a step and a loss, None where it is not finite."""
    torch.set_num_threads(1)
    began, processor_s = time.monotonic(), time.process_time()
    workload = WORKLOADS[training.workload]
    draw, held_out = workload.data()
    torch.manual_seed(training.seed)
    network = workload.network().to(device)
    random = np.random.default_rng(training.seed)
    optimizer = OPTIMIZERS[training.optimizer](network.parameters(), training.rate, training.decay)
    steps = round(workload.steps * training.horizon)
    every, first = max(1, workload.steps // EVALUATIONS), FIRST_EVALUATED * workload.steps
    pairs = [(inputs.to(device), targets.to(device)) for inputs, targets in held_out]
    curve: list[tuple[int, float | None]] = []
    for step in range(steps):
        inputs, targets = draw(random, workload.batch)
        for group in optimizer.param_groups:
            group["lr"] = training.rate * factor(step, steps)
        loss = workload.loss(network(inputs.to(device)), targets.to(device))
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        done = step + 1
        if done == steps or (done >= first and done % every == 0):
            found = evaluated(network, workload.loss, pairs)
            curve.append((done, round(found, 6) if math.isfinite(found) else None))
            if not math.isfinite(found):
                break
    spent = {"seconds": time.monotonic() - began, "cpu_seconds": time.process_time() - processor_s}
    return {"curve": curve, **{name: round(value, 2) for name, value in spent.items()}}


def evaluated(
    network: nn.Module, loss: Callable[[Tensor, Tensor], Tensor], pairs: Iterable[tuple[Tensor, Tensor]]
) -> float:
    """Return the mean loss of held-out batches, with a network that evaluates."""
    network.eval()
    with torch.no_grad():
        found = [float(loss(network(inputs), targets)) for inputs, targets in pairs]
    network.train()
    return sum(found) / len(found)


class Record:
    """The trainings of a file, one JSON object per line, each with the time at which it ended.

    Args:
        path: the file; it need not exist.
        told: what each new line says besides.
    """

    def __init__(self, path: Path, told: Mapping[str, Any] | None = None) -> None:
        self.path, self._told = path, dict(told or {})
        self.lines: dict[str, Line] = {}
        if path.exists():
            for text in path.read_text(encoding="utf-8").splitlines():
                line = json.loads(text)
                self.lines[line["run"]] = line

    def add(self, name: str, found: Line) -> None:
        """Append a line, and keep it."""
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        line = {"run": name, **found, **self._told, "ended": now}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        self.lines[name] = line

    def digest(self) -> str:
        """Return what identifies the file's present content."""
        return hashlib.blake2b(self.path.read_bytes(), digest_size=8).hexdigest()


class Pool:
    """Processes that train, one training at a time each.

    Args:
        jobs: the number of processes.
        device: where networks are.
        work: a function of a training and the device that returns what to record; it can be pickled.
    """

    def __init__(self, jobs: int, device: str, work: Callable[[Any, str], Line] = train) -> None:
        self._device, self._work = device, work
        # A forked process has the workloads' data already; CUDA must be initialized in each process itself.
        self._processes = ProcessPoolExecutor(jobs, multiprocessing.get_context("fork"))
        self._running: dict[Future[Line], tuple[Any, Record]] = {}

    def start(self, training: Any, record: Record) -> None:
        """Start a training, a dataclass with a name, unless the record has it."""
        if training.name in record.lines:
            return
        future = self._processes.submit(self._work, training, self._device)
        self._running[future] = training, record

    def collected(self) -> bool:
        """Wait for a training to end, and record it; return False if none was running."""
        if not self._running:
            self._processes.shutdown()
            return False
        done, _ = wait(self._running, return_when=FIRST_COMPLETED)
        for future in done:
            training, record = self._running.pop(future)
            found = future.result()
            record.add(training.name, {**asdict(training), **found})
            print(f"{training.name}: {found['curve'][-1]}, {found['seconds']:.1f} s", flush=True)
        return True


def told(device: str, digests: Mapping[str, str]) -> Line:
    """Return what every line of a record says about this command."""
    name = torch.cuda.get_device_name() if device.startswith("cuda") else "cpu"
    return {"commit": commit(), "device": name, "torch": torch.__version__, "data": dict(digests)}
