"""Unmodified torch.distributed programs: equal losses on Gloo and multiring.

benchmarks/promises/conformance_torch.py runs the other programs, which need libraries or take minutes.
"""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tests.support.program_cases import CASES, STEPS, apart, is_close
from tests.support.program_ranks import PROGRAMS, ProgramError, environment_of, losses_of
from tests.support.ranks import Process
from tests.support.scripts import Start, run_script
from torch.distributed import TCPStore  # type: ignore[attr-defined] # torch defines it

RESTARTED = Path(__file__).parents[2] / "support" / "restarted_program.py"
pytestmark = pytest.mark.timeout(960)  # three programs, each with its own time-out


FORKED = Process(
    nursery="torch",
    beforehand=(
        *("torch.distributed.fsdp", "torch.distributed.tensor.parallel", "torch.distributed.checkpoint.state_dict"),
        *("torch.distributed.checkpoint.state_dict_saver", "torch.distributed.checkpoint.state_dict_loader"),
    ),
)


@cache
def forked_losses(program: str, ranks: int, *arguments: str, backend: str) -> list[float]:
    """Run like `losses_of`, but on forked ranks."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    start = Start(alone=True, environments=tuple(environment_of(rank, ranks, store.port) for rank in range(ranks)))
    words = ("--backend", backend, *arguments)
    ended = run_script(PROGRAMS / program, ranks, *words, process=FORKED, start=start, deadline_s=300.0)
    assert all(code == 0 for code, _ in ended), ended
    found: list[float] = json.loads(ended[0][1].splitlines()[-1])
    return found


def test_every_program_has_a_case() -> None:
    run = {case.program for case in CASES.values()} | {"checkpoint.py"}
    assert run == {path.name for path in PROGRAMS.glob("*.py")} - {"steps.py"}  # which the programs share


def test_losses_are_those_of_gloo() -> None:
    program, words = CASES["tensor"].program, ("--steps", str(STEPS))
    ours, theirs = (forked_losses(program, 2, *words, backend=name) for name in ("multiring", "gloo"))
    assert is_close(ours, theirs, 2), apart(ours, theirs)
    assert len(set(ours)) == len(ours) == STEPS


def test_averages_are_sums_divided() -> None:
    """Division by 2 is exact, so averages equal divided sums in every bit."""
    averaged, divided = (forked_losses("fsdp2.py", 2, *how, backend="multiring") for how in ((), ("--sum",)))
    assert averaged == divided


def test_checkpoints_go_on_with_other_ranks(tmp_path: Path) -> None:
    """Two ranks save, and three ranks resume, also on the other backend."""
    where = ("--folder", str(tmp_path))
    forked_losses("checkpoint.py", 2, *where, backend="multiring")
    ours, theirs = (
        forked_losses("checkpoint.py", 3, *where, "--resume", backend=name) for name in ("multiring", "gloo")
    )
    assert is_close(ours, theirs, 3), apart(ours, theirs)


def told_by_torchrun(*words: str) -> Any:
    """Run a program on two ranks by torchrun, and return the JSON in its last line."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, *words],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_torchrun_needs_the_name_alone() -> None:
    """The program needs no import of multiring and no variable in the environment."""
    told = told_by_torchrun(str(PROGRAMS / "ddp.py"), "--backend", "multiring", "--steps", str(STEPS))
    assert told == forked_losses("ddp.py", 2, "--steps", str(STEPS), backend="gloo")


@pytest.mark.parametrize(("kind", "victim"), [("ddp", 0), ("fsdp2", 1)])
def test_torchrun_starts_a_job_again_from_its_checkpoint(kind: str, victim: int, tmp_path: Path) -> None:
    """The losses equal those of a job without a lost rank in every bit."""
    folders = [tmp_path / name for name in ("whole", "restarted")]
    for each in folders:
        each.mkdir()
    restarted = told_by_torchrun("--max-restarts", "1", str(RESTARTED), kind, str(folders[1]), str(victim))
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    start = Start(alone=True, environments=tuple(environment_of(rank, 2, store.port) for rank in range(2)))
    whole = run_script(RESTARTED, 2, kind, str(folders[0]), "-1", process=FORKED, start=start, deadline_s=300.0)
    first = json.loads(whole[0][1].splitlines()[-1])
    assert (first["began"], restarted["began"]) == (0, 5)
    assert first["losses"] == restarted["losses"]
    assert len(set(first["losses"])) == 12


def test_a_program_that_fails_is_named() -> None:
    with pytest.raises(ProgramError, match=r"(?s)ddp\.py.*rank 0 ended with 1.*no-such"):
        losses_of("ddp.py", 1, backend="no-such")
