"""Training on devices that resumes after a rank was killed, and a rank whose device has failed for good."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.standin.torch_devices import fail_call
from tests.support.cuda_torch_ranks import TRAINING_SHAPES, report_of_cuda, run_cuda
from tests.support.device_training import HOST, OPTIMIZERS, batch, join, mean_loss, model_of, own_batch
from tests.support.ranks import Here
from torch import Tensor

import multiring.torch as mt
from multiring.errors import RendezvousError

STEPS, COMMIT_EVERY = 12, 3
DEATHS = {"before": (4, 8), "backward": (5,), "after": (4,), "commit": (6,)}  # the steps in which rank 1 is killed
SOON_S = 50  # of a job that would take 2 s on a quiet machine


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Copied:
    """A value of a state that kills the process that copies it, if told so."""

    kills = False

    def __deepcopy__(self, _: Any) -> "Copied":
        if Copied.kills:
            die()
        return Copied()


def train(here: Here, phase: str, last: int | None) -> tuple[list[float], int]:
    """Train on this rank's device; return the losses, and how often the training was resumed.

    The process is killed in step `last`.
    """
    device = join(here)
    model: Any = model_of("perceptron", device)
    plain = OPTIMIZERS["adam"](model.parameters())
    optimizer: Any = mt.DistributedOptimizer(plain, model.named_parameters(), bucket_bytes=600)
    kept: list[Tensor] = []
    state: Any = mt.elastic.TorchState(model, optimizer, step=0, losses=kept, beside=Copied())
    resets: list[int] = []
    state.register_reset_callbacks([lambda: resets.append(mt.size())])

    @mt.elastic.run
    def go(state: Any) -> list[float]:
        while state.step < STEPS:
            dies = state.step == last
            optimizer.zero_grad()
            loss = mean_loss(model, own_batch(here, state.step, "perceptron", device))
            if dies and phase == "before":
                die()
            if dies and phase == "backward":
                model[0].weight.register_hook(die)
            loss.backward()
            if dies and phase == "after":
                die()
            optimizer.step()
            state.losses = [*state.losses, mt.allreduce(loss.detach())]
            state.step += 1
            if state.step % COMMIT_EVERY == 0:
                Copied.kills = phase == "commit" and state.step == last
                state.commit()
        return [float(each) for each in state.losses]

    found = go(state)
    assert next(model.parameters()).device == device
    sums = torch.stack([each.detach().double().sum() for each in model.parameters()])
    assert torch.equal(mt.allreduce(sums, op=mt.Min), mt.allreduce(sums, op=mt.Max))
    assert set(resets) <= {here.size}
    return found, len(resets)


def of_one_process(ranks: int) -> list[float]:
    model = model_of("perceptron", HOST)
    optimizer = OPTIMIZERS["adam"](model.parameters())
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = mean_loss(model, batch(step, ranks, "perceptron"))
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def lose_rank_1(here: Here, phase: str, process: int) -> int:
    """Train; return how often this process resumed. Processes of rank 1 are killed and replaced."""
    deaths = DEATHS[phase]
    start_s = time.monotonic()
    losses, resumed = train(here, phase, deaths[process] if here.rank == 1 and process < len(deaths) else None)
    assert losses == pytest.approx(of_one_process(here.size), rel=1e-6)
    assert time.monotonic() - start_s < SOON_S
    return resumed


@pytest.mark.parametrize(("hosts", "devices"), [each for each in TRAINING_SHAPES if each != (1, 1)])
@pytest.mark.parametrize("phase", DEATHS)
def test_the_others_go_on_from_the_last_commit(phase: str, hosts: int, devices: int) -> None:
    found = run_cuda(
        lose_rank_1, phase, hosts=hosts, devices=devices, init_timeout_s=20.0, killed={1: len(DEATHS[phase])}
    )
    assert found == [0 if rank == 1 else len(DEATHS[phase]) for rank in range(hosts * devices)]


# ---- an error of CUDA that stays ----

ILLEGAL_ADDRESS = 700  # every later call of the process fails, too
CALLS = (0, 40, 150, 250)  # of CUDA in a step, before the one that fails: on the program's thread, and on multiring's


def break_a_device(here: Here, after: int) -> None:
    device = join(here)
    model: Any = model_of("perceptron", device)
    plain = OPTIMIZERS["adam"](model.parameters())
    optimizer: Any = mt.DistributedOptimizer(plain, model.named_parameters(), bucket_bytes=600)
    state: Any = mt.elastic.TorchState(model, optimizer, step=0)

    @mt.elastic.run
    def go(state: Any) -> None:
        while state.step < STEPS:
            if state.step == 4 and here.rank == 1:
                fail_call(ILLEGAL_ADDRESS, after)
            optimizer.zero_grad()
            mean_loss(model, own_batch(here, state.step, "perceptron", device)).backward()
            optimizer.step()
            state.step += 1
            state.commit()

    go(state)


@pytest.mark.parametrize("after", CALLS)
def test_a_rank_whose_device_failed_ends_with_that_error(after: int) -> None:
    start_s = time.monotonic()
    report = report_of_cuda(break_a_device, after, devices=2, init_timeout_s=2.0)
    other, broken = report.outcomes
    # torch ends the process at once if it meets the error while it frees a tensor.
    assert broken.exit_code in (1, -signal.SIGABRT), broken
    assert "an illegal memory access was encountered" in broken.output
    assert isinstance(other.error, RendezvousError), other
    assert "rank 1 did not arrive" in str(other.error)
    assert time.monotonic() - start_s < SOON_S


PROGRAM = """
import sys, time
from pathlib import Path
import torch
from tests.standin.torch_devices import fail_call
from tests.support.device_training import OPTIMIZERS, mean_loss, model_of, own_batch
import multiring.torch as mt

folder, steps, code = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
mt.init()


class Here:
    rank, size = mt.rank(), mt.size()


device = mt.local_device()
assert device.index == Here.rank
model = model_of("perceptron", device)
optimizer = mt.DistributedOptimizer(OPTIMIZERS["adam"](model.parameters()), model.named_parameters())
step, losses = 0, []
is_first = not mt.is_saved(folder / "last")
if not is_first:
    found = mt.load(folder / "last", model=model, optimizer=optimizer)
    step, losses = found["step"], found["losses"]
while step < steps:
    if step == 5 and is_first and Here.rank == 1:
        fail_call(code, 20)
    optimizer.zero_grad()
    loss = mean_loss(model, own_batch(Here, step, "perceptron", device))
    loss.backward()
    optimizer.step()
    losses.append(mt.allreduce(loss.detach()).item())
    step += 1
    if step % 2 == 0:
        mt.save(folder / "last", model=model, optimizer=optimizer, step=step, losses=losses)
print("losses", *losses)
"""


def test_the_launcher_restarts_it(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    launcher = [sys.executable, "-m", "multiring", "run", "-n", "2", "--max-restarts", "1", "--"]
    command = [*launcher, sys.executable, "-m", "tests.standin", str(program)]
    done = subprocess.run(
        [*command, str(tmp_path), str(STEPS), str(ILLEGAL_ADDRESS)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, "STANDIN_DEVICES": "2"},
    )
    assert done.returncode == 0, done.stderr
    assert "an illegal memory access was encountered" in done.stderr
    assert "multiring: start 2 of at most 2" in done.stderr
    ends = [line.split("losses ")[1].split() for line in done.stdout.splitlines() if "losses" in line]
    assert len(ends) == 2
    for losses in ends:
        assert [float(each) for each in losses] == pytest.approx(of_one_process(2), rel=1e-6)
