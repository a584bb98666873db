"""Train scripts with `distribute` under elastic.run, and write down each step; a rank of distribute.py."""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset

import multiring.torch as mt
from multiring._settings import Settings
from multiring.data import ArrayDataset

EPOCHS, SAMPLES, BATCH, FEATURES = 20, 97, 12, 6
STEPS = EPOCHS * -(-SAMPLES // BATCH)


def made() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return a model and its optimizer."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(FEATURES, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def fields() -> dict[str, np.ndarray[Any, Any]]:
    """Return the data."""
    points = np.random.default_rng(0).standard_normal((SAMPLES, FEATURES))
    return {"points": points, "goals": np.sin(points.sum(axis=1, keepdims=True)), "numbers": np.arange(SAMPLES)}


def of_torch() -> DataLoader[Any]:
    """Return a loader of torch, with a generator of its own."""
    tensors = TensorDataset(*map(torch.from_numpy, fields().values()))
    return DataLoader(tensors, BATCH, shuffle=True, generator=torch.Generator().manual_seed(3))


def of_multiring() -> ArrayDataset:
    """Return a data set in an order that its seed determines."""
    return ArrayDataset(fields(), seed=4)


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, points: Any, goals: Any) -> Any:
    """Make a step, and return the loss."""
    loss = torch.nn.functional.mse_loss(model(points), goals)
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call] # torch's own
    optimizer.step()
    return loss.detach()


def main() -> None:
    """Train with both loaders."""
    folder, shares, pause_s = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
    settings = Settings.from_environment()
    born = int(settings.intake or settings.rank or 0)
    (folder / f"pid-{born}.new").write_text(str(os.getpid()))
    (folder / f"pid-{born}.new").rename(folder / f"pid-{born}")
    torch.set_num_threads(1)
    mt.init()
    log = os.open(folder / "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def note(kind: str, number: int) -> None:
        os.write(log, f"{time.time():.6f} {born} {kind} {number} {mt.size()}\n".encode())

    model, optimizer, loader = mt.distribute(*made(), of_torch(), shares=shares)
    second, its_optimizer, fed = mt.distribute(*made(), mt.DataLoader(of_multiring(), BATCH), shares=shares)
    state: Any = mt.elastic.TorchState(
        model, optimizer, loader=loader, second=second, its_optimizer=its_optimizer, fed=fed, step=0, told=[]
    )

    @mt.elastic.run
    def train(state: Any) -> None:
        note("begin", state.step)
        while state.loader.epoch < EPOCHS:
            for (points, goals, numbers), other in zip(state.loader, state.fed, strict=False):
                time.sleep(pause_s * len(numbers) * (1 + born % 3))
                losses = [state.loader.global_loss(step(model, optimizer, points, goals))]
                losses.append(state.fed.global_loss(step(second, its_optimizer, other["points"], other["goals"])))
                # A rank without samples of its own computes on another rank's.
                found = mt.allgather_object([numbers.tolist(), other["numbers"].tolist()])
                seen = [sorted({number for part in each for number in part}) for each in zip(*found, strict=True)]
                state.told = [*state.told, [[float(each) for each in losses], seen]]
                state.step += 1
                state.commit()
                note("commit", state.step)

    (folder / f"in-{born}").touch()
    train(state)
    (folder / f"end-{born}").write_text(json.dumps(state.told))
    mt.shutdown()


if __name__ == "__main__":
    main()
