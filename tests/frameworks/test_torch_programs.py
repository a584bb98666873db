"""Unmodified programs for torch.distributed: with Gloo's name and with ours they have the same losses.

At two ranks every order of summation gives the same bits; at more, the first step differs by what float32 rounds and
training makes that grow.
"""

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from tests.frameworks.program_ranks import PROGRAMS, losses_of

FIRST, LATER = 1e-6, 1e-4  # relative; of the first step, and of all 50
# Averages are what Gloo gets wrong, so that the two are compared on sums.
CASES = {
    "ddp": ("ddp.py", (), (2, 3)),
    "accelerate": ("with_accelerate.py", (), (2, 3)),
    "lightning": ("with_lightning.py", (), (2, 3)),
    "trainer": ("with_trainer.py", (), (2, 3)),
    "fsdp2": ("fsdp2.py", ("--sum",), (2, 3)),
    "hsdp": ("fsdp2.py", ("--sum", "--replicas", "2"), (4,)),
    "tensor parallel": ("tensor_parallel.py", ("--sum",), (2, 4)),
    "gpipe": ("pipeline.py", ("--schedule", "gpipe"), (2, 3)),
    "1f1b": ("pipeline.py", ("--schedule", "1f1b"), (2, 3)),
    "interleaved": ("pipeline.py", ("--schedule", "interleaved"), (2, 4)),
    "context parallel": ("context_parallel.py", (), (2, 4)),
}


@cache
def losses(name: str, ranks: int, backend: str) -> list[float]:
    program, arguments, _ = CASES[name]
    steps = "10" if ranks == 2 else "50"
    found = losses_of(program, ranks, "--steps", steps, *arguments, backend=backend)
    assert len(found) == int(steps)
    return found


def apart(ours: list[float], theirs: list[float]) -> list[float]:
    """Return the relative differences of losses, by step."""
    return [abs(one - other) / abs(other) for one, other in zip(ours, theirs, strict=True)]


def test_every_program_is_run() -> None:
    run = {program for program, _, _ in CASES.values()} | {"checkpoint.py"}
    assert run == {path.name for path in PROGRAMS.glob("*.py")}


@pytest.mark.parametrize("name", [name for name, (_, _, sizes) in CASES.items() if 2 in sizes])
def test_two_ranks_have_the_same_bits(name: str) -> None:
    ours, theirs = losses(name, 2, "multiring"), losses(name, 2, "gloo")
    assert ours == theirs
    assert len(set(ours)) == len(ours)  # it learns


@pytest.mark.parametrize("name", CASES)
def test_more_ranks_stay_close(name: str) -> None:
    ranks = CASES[name][2][-1]
    differences = apart(losses(name, ranks, "multiring"), losses(name, ranks, "gloo"))
    assert differences[0] <= FIRST
    assert max(differences) <= LATER


@pytest.mark.parametrize("arguments", [(), ("--replicas", "2")])
def test_averages_are_sums_divided(arguments: tuple[str, ...]) -> None:
    """Dividing by 2 or 4 rounds nothing: before or after the sum, the bits are the same."""
    ranks = 4 if arguments else 2
    averaged = losses_of("fsdp2.py", ranks, "--steps", "10", *arguments, backend="multiring")
    divided = losses_of("fsdp2.py", ranks, "--steps", "10", *arguments, "--sum", backend="multiring")
    assert max(apart(averaged, divided)) <= FIRST


def test_checkpoints_go_on_with_other_ranks(tmp_path: Path) -> None:
    """Two ranks save and three go on, where two would have gone on just as well."""
    folder = {backend: ("--folder", str(tmp_path / backend)) for backend in ("multiring", "gloo")}
    for backend, where in folder.items():
        losses_of("checkpoint.py", 2, *where, "--sum", backend=backend)
    ours = losses_of("checkpoint.py", 3, *folder["multiring"], "--resume", "--sum", backend="multiring")
    theirs = losses_of("checkpoint.py", 3, *folder["gloo"], "--resume", "--sum", backend="gloo")
    unchanged = losses_of("checkpoint.py", 2, *folder["multiring"], "--resume", "--sum", backend="multiring")
    crossed = losses_of("checkpoint.py", 3, *folder["gloo"], "--resume", "--sum", backend="multiring")
    assert apart(ours, theirs)[0] <= FIRST
    assert max(apart(ours, theirs)) <= LATER
    assert max(apart(ours, unchanged)) <= LATER
    assert max(apart(crossed, theirs)) <= LATER


def test_torchrun_needs_the_name_alone() -> None:
    """No import of ours, nothing in the environment."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, str(PROGRAMS / "ddp.py"), "--backend", "multiring", "--steps", "3"],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("[")
