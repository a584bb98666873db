"""Unmodified programs for torch.distributed: with Gloo's name and with ours they have the same losses.

At two ranks every order of summation gives the same bits; at more, the first step differs by what float32 rounds and
training makes that grow.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.frameworks.program_cases import CASES, FIRST, LATER, STEPS, apart, losses
from tests.frameworks.program_ranks import PROGRAMS, losses_of


def test_every_program_is_run() -> None:
    run = {case.program for case in CASES.values()} | {"checkpoint.py"}
    assert run == {path.name for path in PROGRAMS.glob("*.py")}


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if 2 in case.sizes])
def test_two_ranks_have_the_same_bits(name: str) -> None:
    ours, theirs = losses(name, 2, "multiring"), losses(name, 2, "gloo")
    assert ours == theirs
    assert len(set(ours)) == len(ours) == STEPS[2]


# The others, which take a minute, are run by benchmarks/conformance_torch.py.
@pytest.mark.parametrize("name", ["ddp", "hsdp", "interleaved"])
def test_more_ranks_stay_close(name: str) -> None:
    ranks = CASES[name].sizes[-1]
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
        losses_of("checkpoint.py", 2, *where, backend=backend)
    ours = losses_of("checkpoint.py", 3, *folder["multiring"], "--resume", backend="multiring")
    theirs = losses_of("checkpoint.py", 3, *folder["gloo"], "--resume", backend="gloo")
    unchanged = losses_of("checkpoint.py", 2, *folder["multiring"], "--resume", backend="multiring")
    crossed = losses_of("checkpoint.py", 3, *folder["gloo"], "--resume", backend="multiring")
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
