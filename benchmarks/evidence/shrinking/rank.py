"""Train with NumPy or torch under elastic.run, and write down each step; a rank of main.py."""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import multiring.adapters as ma
from multiring._settings import Settings
from multiring.adapters import elastic

folder, steps, pause_s, kind = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4]
born = int(Settings.from_environment().intake or Settings.from_environment().rank or 0)
(folder / f"pid-{born}.new").write_text(str(os.getpid()))
(folder / f"pid-{born}.new").rename(folder / f"pid-{born}")
(folder / f"place-{born}").write_text(f"{os.getpid()} {os.uname().nodename}")
(folder / f"place-{born}").rename(folder / f"host-{born}")
ma.init()
log = os.open(folder / "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
samples = np.random.default_rng(0).standard_normal((4096, 20))
wanted = samples @ np.arange(20.0)


def note(kind: str, step: int) -> None:
    """Write a line that later lines of other ranks do not overwrite."""
    os.write(log, f"{time.time():.6f} {born} {kind} {step} {ma.size()}\n".encode())


def with_numpy() -> tuple[Any, Callable[[Any, int], None], Callable[[Any], list[float]]]:
    """Return a state, a function that makes a step with one sample, and one that returns the weights."""
    state = elastic.ObjectState(
        bcast_object=ma.broadcast_object,
        get_rank=ma.rank,
        gather_object=ma.allgather_object,
        step=0,
        weights=np.zeros(20),
        sizes=[],
    )

    def step(state: Any, at: int) -> None:
        gradient = (samples[at] @ state.weights - wanted[at]) * samples[at]
        state.weights = state.weights - 0.01 * np.asarray(ma.allreduce(gradient))

    return state, step, lambda state: state.weights.tolist()


def with_torch() -> tuple[Any, Callable[[Any, int], None], Callable[[Any], list[float]]]:
    """Return the same as `with_numpy`, with a module and a DistributedOptimizer."""
    import torch  # noqa: PLC0415 -- it takes seconds

    import multiring.torch as mt  # noqa: PLC0415 -- it imports torch

    torch.set_num_threads(1)
    model = torch.nn.Linear(20, 1, bias=False, dtype=torch.float64)
    torch.nn.init.zeros_(model.weight)
    optimizer = mt.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01), named_parameters=model.named_parameters()
    )
    inputs, goals = torch.from_numpy(samples), torch.from_numpy(wanted)

    def step(_state: Any, at: int) -> None:
        optimizer.zero_grad()
        (0.5 * (model(inputs[at]) - goals[at]) ** 2).sum().backward()
        optimizer.step()

    state = mt.elastic.TorchState(model, optimizer, step=0, sizes=[])
    return state, step, lambda _state: model.weight.detach()[0].tolist()


state, step, weights_of = with_torch() if kind == "torch" else with_numpy()


@elastic.run
def train(state: Any) -> None:
    """Train to the last step."""
    note("begin", state.step)
    while state.step < steps:
        step(state, (state.step * 8 + ma.rank()) % len(samples))
        state.sizes = [*state.sizes, ma.size()]
        state.step += 1
        state.commit()
        note("commit", state.step)
        time.sleep(pause_s)


(folder / f"in-{born}").touch()
train(state)
(folder / f"end-{born}").write_text(json.dumps([state.sizes, weights_of(state)]))
ma.shutdown()
