"""Run one rank of main.py.

python rank.py FOLDER MODEL TURNS
"""

import gc
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.evidence.jobs.rank import tell
from torch import Tensor, nn

from multiring._settings import Settings
from multiring.torch.parallelizing.deciding import Prospect, build, look
from multiring.torch.parallelizing.model import ParallelModel

CLASSES, WARM_UP, MIB = 10, 2, 1 << 20
# The relative tolerance for the losses of the first steps. Parallelisms sum in different orders, and Adam amplifies
# small differences. After five steps in float32, `large` differs by 1e-3 from the loss in float64. In float64, all
# parallelisms agree to ten digits (tests/frameworks checks this for SGD).
AGREE, COMPARED = 1e-4, 3


class Block(nn.Module):
    """A residual block of two linear layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, given: Tensor) -> Tensor:
        """Return the input plus the output of the block's body."""
        made: Tensor = given + self.body(given)
        return made


@dataclass(frozen=True, slots=True)
class Case:
    """A model, the batch of all ranks, and a rank's memory limit (None: unlimited)."""

    make: Callable[[], nn.Sequential]
    inputs: Callable[[], Tensor]
    memory_bytes: float | None = None


def _wide() -> nn.Sequential:
    layers: list[nn.Module] = []
    for _ in range(2):
        layers += [nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 1024), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(1024, CLASSES))


def _deep() -> nn.Sequential:
    return nn.Sequential(*(Block(256) for _ in range(20)), nn.Linear(256, CLASSES))


def _embedding() -> nn.Sequential:
    return nn.Sequential(
        nn.Embedding(100_000, 64), nn.Flatten(), nn.Linear(8 * 64, 256), nn.ReLU(), nn.Linear(256, CLASSES)
    )


def _convolutional() -> nn.Sequential:
    layers: list[nn.Module] = [nn.Conv2d(3, 32, 3, padding=1), nn.ReLU()]
    for into in (32, 64, 128):
        layers += [nn.Conv2d(into, 2 * into, 3, stride=2, padding=1), nn.GroupNorm(8, 2 * into), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, CLASSES))


def _large() -> nn.Sequential:
    layers: list[nn.Module] = []
    for _ in range(10):
        layers += [nn.Linear(1000, 1000), nn.LayerNorm(1000), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(1000, CLASSES))


CASES = {
    "wide": Case(_wide, lambda: torch.randn(64, 1024)),
    "deep": Case(_deep, lambda: torch.randn(512, 256)),
    "embedding": Case(_embedding, lambda: torch.randint(100_000, (256, 8))),
    "convolutional": Case(_convolutional, lambda: torch.randn(64, 3, 32, 32)),
    # The parameters, gradients and Adam's moments take 153 MiB.
    "large": Case(_large, lambda: torch.randn(128, 1000), 100.0 * MIB),
}


@dataclass(frozen=True, slots=True)
class Trial:
    """A model under one parallelism, its optimizer, and its step times and losses."""

    model: ParallelModel
    optimizer: torch.optim.Optimizer
    seconds: list[float]
    losses: list[float]

    def turn(self, inputs: Tensor, targets: Tensor) -> None:
        """Take one step, and record the time of the slowest rank."""
        given = self.model.share(inputs, targets)
        dist.barrier()
        begin = time.perf_counter()
        self.optimizer.zero_grad()
        loss = self.model.step(given[0], given[1], nn.functional.cross_entropy)
        self.optimizer.step()
        took = torch.tensor(time.perf_counter() - begin, dtype=torch.float64)
        dist.all_reduce(took, dist.ReduceOp.MAX)
        self.seconds.append(float(took))
        self.losses.append(float(loss))


def trial(case: Case, mesh: Any, prospect: Prospect) -> Trial:
    """Return the trial of a case under `mesh`."""
    torch.manual_seed(0)
    model = build(case.make(), mesh, prospect)
    return Trial(model, torch.optim.Adam(model.parameters(), lr=1e-4), [], [])


def main() -> None:
    """Measure every parallelism of one model."""
    folder, name, turns = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    settings = Settings.from_environment()
    torch.set_num_threads(1)
    backend = "multiring" if hasattr(dist.Backend, "MULTIRING") else "gloo"
    if settings.rank is None or settings.size is None:
        raise SystemExit("not started by `multiring lab`: run main.py")
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=settings.rank, world_size=settings.size)
    case = CASES[name]
    torch.manual_seed(0)
    model, inputs = case.make(), case.inputs()
    targets = torch.randint(CLASSES, (len(inputs),))
    prospect = look(model, (inputs,), case.memory_bytes, 2, None)
    del model
    fitting = [each for each in prospect.forecasts if each.fits]
    taken = prospect.taken("auto")
    trials = [trial(case, each.parallelism, prospect) for each in fitting]
    gc.collect()
    for turn in range(WARM_UP + turns):
        for each in trials[turn % len(trials) :] + trials[: turn % len(trials)]:
            each.turn(inputs, targets)
    first, *others = (each.losses[:COMPARED] for each in trials)
    agree = all(abs(a - b) <= AGREE * abs(a) for losses in others for a, b in zip(first, losses, strict=True))
    if dist.get_rank() == 0:
        parallelisms = [
            {
                "mix": str(each.parallelism),
                "chosen": each.parallelism == taken,
                "predicted_s": each.seconds.total,
                "parts_s": [each.seconds.compute, each.seconds.exchange, each.seconds.update],
                "memory_bytes": each.memory.total,
                "seconds": trial.seconds[WARM_UP:],
                "losses": trial.losses,
            }
            for each, trial in zip(fitting, trials, strict=True)
        ]
        profile = prospect.measured.profile
        told = {"compute": [[each.samples, each.seconds] for each in profile.compute], "crowding": profile.crowding}
        tell(folder, parallelisms=parallelisms, agree=agree, backend=backend, overheads=str(profile.overheads), **told)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
