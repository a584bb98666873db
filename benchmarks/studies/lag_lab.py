"""Measure the share of a reduction that gradient lag hides.

    sudo .venv/bin/python benchmarks/studies/lag_lab.py [--hosts 4] [--link 1gbit --link 4gbit] [--steps 12]

The lab has virtual hosts and links of a chosen speed. The gradients are those of the climate example's DeepLabv3+ (44.8
million parameters, 179 MB in float32, 211 tensors). Forward, backward and the optimizer's arithmetic are emulated by
sleeping, as if another device did them. A sample takes 375 ms, as published for a V100 with 16-bit arithmetic (Kurth et
al., SC18, arXiv 1810.01993: 2.67 samples/s). A third of the time is the forward. The rest is spread over the layers by
their parameters, so gradients appear one after the other as in a real backward. The other parts of a step are real: the
gradients are copied into buckets and reduced over the links.

    hidden share = (compute + comm - step) / min(compute, comm)

    compute  a step of a plain optimizer, on all hosts at once
    comm     a reduction of the same buckets alone
    step     a step of a DistributedOptimizer, with lag 0 and with lag 1

Each of them is a median over the steps of rank 0. The kinds alternate in blocks, and each block begins with two warm-up
steps. The interval of the share comes from resampling all three. The floor is 90 % with lag 1, and the aim is 97 %.
With lag 0, only backward hides communication. The exit code is 1 if the floor is missed.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # lets this script import from the repository root

from benchmarks.evidence.support.claims import commit, machine  # noqa: E402

import multiring.torch as mt  # noqa: E402
from multiring._settings import inherited_environment  # noqa: E402

SAMPLE_S = 0.375
FORWARD = 1 / 3
WARM_UP = 2
BLOCKS = 3
FLOOR, AIM = 0.90, 0.97
WIRES = {"float32": mt.Compression.none, "bf16": mt.Compression.bf16}
JOB_S = 540.0


class Emulated(torch.autograd.Function):
    """An emulated layer.

    Forward does nothing. Backward sleeps, then returns the layer's prepared gradient.
    """

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, gradient: Tensor, seconds: float) -> Tensor:
        """Return a copy of `inputs`."""
        del weight
        ctx.gradient, ctx.seconds = gradient, seconds
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """Sleep, then return the prepared gradient."""
        if ctx.seconds:
            time.sleep(ctx.seconds)
        return outputs[0], ctx.gradient.detach(), None, None


class Network(nn.Module):
    """A network with DeepLabv3+'s parameters and an emulated forward and backward."""

    def __init__(self, seconds: float, like: "Network | None") -> None:
        super().__init__()
        from examples.climate.deeplab import DeepLabV3Plus  # noqa: PLC0415 -- where ranks need it

        weights = DeepLabV3Plus().parameters() if like is None else like.weights
        self.weights: nn.ParameterList = nn.ParameterList(nn.Parameter(each.detach()) for each in weights)
        gradients = [torch.full_like(each.detach(), 1e-6) for each in self.weights] if like is None else like.gradients
        self.gradients: list[Tensor] = gradients
        self._seconds = seconds

    def forward(self, inputs: Tensor) -> Tensor:
        """Sleep for the time of the forward, then connect the emulated layers."""
        time.sleep(self._seconds * FORWARD)
        total, owed = sum(each.numel() for each in self.weights), 0.0
        for weight, gradient in zip(self.weights, self.gradients, strict=True):
            owed += self._seconds * (1 - FORWARD) * weight.numel() / total
            # A sleep of less than a millisecond takes longer than asked, so short times are added up.
            seconds, owed = (owed, 0.0) if owed > 1e-3 else (0.0, owed)
            inputs = Emulated.apply(inputs, weight, gradient, seconds)  # type: ignore[no-untyped-call] # torch's own
        return inputs.sum()


class Asleep(torch.optim.Optimizer):
    """An optimizer without arithmetic, because the emulated computation includes it."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__(network.parameters(), {})

    def step(self, closure: Any = None) -> Any:
        """Do nothing, as if the gradients were applied."""
        return closure


def durations(steps: int, work: Callable[[], object]) -> list[float]:
    """Return the seconds of each of `steps` calls, after some warm-up calls."""
    mt.barrier()
    found, at = [], time.perf_counter()
    for _ in range(WARM_UP + steps):
        work()
        now = time.perf_counter()
        found.append(now - at)
        at = now
    return found[WARM_UP:]


def as_rank(steps: int, seconds: float) -> None:
    """Measure as one rank; rank 0 prints a line of JSON for each wire type."""
    torch.set_num_threads(1)
    mt.init()
    for wire, compression in WIRES.items():
        first = Network(seconds, None)
        # The networks have their own buckets. They share the memory of the weights, which do not change.
        others = [Network(seconds, first) for _ in range(2)]
        shared: list[Any] = [
            mt.DistributedOptimizer(Asleep(each), each.named_parameters(), compression=compression) for each in others
        ]
        lag = mt.gradient_lag(shared[1])
        kinds: dict[str, Callable[[], None]] = {
            "compute": step_of(first, Asleep(first)),
            "comm": partial(reduce, shared[0]),
            "lag 0": step_of(others[0], shared[0]),
            "lag 1": step_of(others[1], shared[1]),
        }
        found: dict[str, list[float]] = {kind: [] for kind in kinds}
        for _ in range(BLOCKS):
            for kind, work in kinds.items():
                found[kind] += durations(-(-steps // BLOCKS), work)
        lag.flush()
        if mt.rank() == 0:
            print(json.dumps({"wire": wire, **found}), flush=True)
    mt.shutdown()


def step_of(network: Network, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Return a function that takes a training step."""
    inputs = torch.zeros(1, requires_grad=True)

    def step() -> None:
        optimizer.zero_grad()
        torch.autograd.backward(network(inputs))
        optimizer.step()

    return step


def reduce(optimizer: Any) -> None:
    """Reduce zeros in place of the gradients."""
    optimizer.zero_grad()
    optimizer.synchronize()


def share_of(compute: float, comm: float, step: float) -> float:
    """Return the share of the reduction that the step hides."""
    return (compute + comm - step) / min(compute, comm)


def interval(found: dict[str, list[float]], lag: str) -> tuple[float, float, float]:
    """Return the hidden share of the medians, and a 95 % interval by resampling."""
    generator = np.random.default_rng(0)
    kinds = [np.array(found[kind]) for kind in ("compute", "comm", lag)]
    again = [[float(np.median(generator.choice(each, len(each)))) for each in kinds] for _ in range(2000)]
    low, high = np.quantile([share_of(*each) for each in again], [0.025, 0.975])
    return share_of(*(statistics.median(each.tolist()) for each in kinds)), float(low), float(high)


def main() -> int:
    """Run a job for each link speed; print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--link", action="append", help="speed of the links; repeatable (default: 1gbit and 4gbit)")
    parser.add_argument("--steps", type=int, default=12, help="measured steps of each kind")
    parser.add_argument("--sample-ms", type=float, default=1e3 * SAMPLE_S, help="emulated computation of a sample")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        as_rank(options.steps, options.sample_ms / 1e3)
        return 0
    print(f"{machine()}, commit {commit()}; {options.hosts} hosts, {options.sample_ms:g} ms of compute asleep a step\n")
    print("| link | wire | compute ms | comm ms | lag 0 ms | hidden, 95 % | lag 1 ms | hidden, 95 % |")
    print("|---|---|---|---|---|---|---|---|")
    least = 1.0
    for link in options.link or ["1gbit", "4gbit"]:
        for found in told(options, link):
            cells = [f"{1e3 * statistics.median(found[kind]):.0f}" for kind in ("compute", "comm")]
            for lag in ("lag 0", "lag 1"):
                share, low, high = interval(found, lag)
                cells += [f"{1e3 * statistics.median(found[lag]):.0f}", f"{share:.0%} ({low:.0%} to {high:.0%})"]
                least = min(least, share) if lag == "lag 1" else least
            print(f"| {link} | {found['wire']} | {' | '.join(cells)} |", flush=True)
    print(f"\nleast hidden share with lag 1: {least:.1%} (floor {FLOOR:.0%}, aim {AIM:.0%})")
    return int(least < FLOOR)


def told(options: argparse.Namespace, link: str) -> list[Any]:
    """Return the measurements of rank 0 of a job with this link, one per wire type."""
    lab = [sys.executable, "-m", "multiring", "lab", "--hosts", str(options.hosts), "--link", link, "--"]
    own = [sys.executable, __file__, "--rank", "--steps", str(options.steps), "--sample-ms", str(options.sample_ms)]
    environment = {**inherited_environment(), "OMP_NUM_THREADS": "1"}
    job = subprocess.run([*lab, *own], stdout=subprocess.PIPE, text=True, timeout=JOB_S, check=True, env=environment)  # noqa: S603
    return [json.loads(line[line.index("{") :]) for line in job.stdout.splitlines() if "{" in line]


if __name__ == "__main__":
    sys.exit(main())
