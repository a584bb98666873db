"""Train with NumPy under elastic.run, and write down each step; a rank of main.py."""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import multiring.adapters as ma
from multiring.adapters import elastic

folder, steps, pause_s = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
ma.init()
born = ma.rank()
log = os.open(folder / "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
samples = np.random.default_rng(0).standard_normal((4096, 20))
wanted = samples @ np.arange(20.0)


def note(kind: str, step: int) -> None:
    """Write a line that later lines of other ranks do not overwrite."""
    os.write(log, f"{time.time():.6f} {born} {kind} {step} {ma.size()}\n".encode())


state: Any = elastic.ObjectState(
    bcast_object=ma.broadcast_object,
    get_rank=ma.rank,
    gather_object=ma.allgather_object,
    step=0,
    weights=np.zeros(20),
    sizes=[],
)


@elastic.run
def train(state: Any) -> None:
    """Train to the last step."""
    note("begin", state.step)
    while state.step < steps:
        at = (state.step * 8 + ma.rank()) % len(samples)
        gradient = (samples[at] @ state.weights - wanted[at]) * samples[at]
        state.weights = state.weights - 0.01 * np.asarray(ma.allreduce(gradient))
        state.sizes = [*state.sizes, ma.size()]
        state.step += 1
        state.commit()
        note("commit", state.step)
        time.sleep(pause_s)


(folder / f"pid-{born}.new").write_text(str(os.getpid()))
(folder / f"pid-{born}.new").rename(folder / f"pid-{born}")
train(state)
(folder / f"end-{born}").write_text(json.dumps([state.sizes, state.weights.tolist()]))
ma.shutdown()
