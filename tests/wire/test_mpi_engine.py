"""The mpi engine beyond the conformance suite: rejected setups, and ranks that die or stop answering."""

import importlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.conformance.test_collectives import conform
from tests.support.mpi_ranks import ROOT, mpi_start
from tests.support.ranks import Here, run_ranks

import multiring
from multiring.errors import MultiringError

INIT = "import multiring, sys; group = multiring.init(); sys.stdout.write(f'size {group.size}')"


def run(prefix: list[str], program: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `program` by the command `prefix`, with MULTIRING_ENGINE=mpi unless `variables` say otherwise."""
    kept = {name: text for name, text in os.environ.items() if not name.startswith("MULTIRING_")}
    return subprocess.run(
        [*prefix, sys.executable, "-c", program, *arguments],
        cwd=ROOT,
        env=kept | {"OMP_NUM_THREADS": "1", "MULTIRING_ENGINE": "mpi"} | variables,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_open_mpi_carries_the_same_bits() -> None:
    assert run_ranks(conform, 3, 31, engine="mpi", mpi="openmpi") == run_ranks(conform, 3, 31, engine="mpi")


def carried_by_mpi(here: Here) -> tuple[int, int, int]:
    """Return the bytes handed to MPI, the bytes that the schedule sends, and the number of segments."""
    engine: Any = importlib.import_module("multiring._runtime.engines.mpi")
    sent = []
    post = engine.MpiEngine._post

    def count(self: Any, message: Any) -> None:
        if message.is_outgoing:
            sent.append(message.size_bytes)
        post(self, message)

    engine.MpiEngine._post = count
    group = here.join()
    array = np.full(1_000_000, here.rank, np.float32)
    group.all_reduce(array)
    assert (array == sum(range(here.size))).all()
    group.barrier()
    assert {plan.engine for plan in group.plans.values()} == {"mpi"}  # the engine in use
    pieces = -(-array.nbytes // (group.plan_of("all_reduce", array.size).segment_bytes or array.nbytes))
    return sum(sent), 2 * array.nbytes * (here.size - 1) // here.size, pieces


def test_all_payload_between_hosts_goes_by_mpi() -> None:
    for sent, want, pieces in run_ranks(carried_by_mpi, 3, engine="mpi"):
        assert abs(sent - want) < 3 * 64 * pieces  # a rank's part of a segment is cut at multiples of 64 bytes


def join_again(here: Here) -> list[int]:
    """Join and leave repeatedly, with the ranks leaving at different times."""
    sums = []
    for turn in range(4):
        group = here.join()
        array = np.full(200_000, here.rank + turn)
        group.all_reduce(array)
        sums.append(int(array[0]))
        if here.rank == turn % here.size:
            group.barrier_async()
        multiring.shutdown()
    return sums


def test_init_again() -> None:
    assert run_ranks(join_again, 3, engine="mpi") == [[3, 6, 9, 12]] * 3


# -- rejected setups: an error with advice on every rank


def test_ranks_that_mpi_did_not_start() -> None:
    done = run([sys.executable, "-m", "multiring", "run", "-n", "2", "--"], INIT)
    assert done.returncode != 0
    for rank in (0, 1):
        assert f"[{rank}]" in done.stderr
    assert "rank 0: MULTIRING_ENGINE=mpi, but these ranks were started by `multiring run`" in done.stderr
    assert "start them with mpiexec" in done.stderr


def test_one_rank_needs_no_mpi() -> None:
    assert run([], INIT).stdout == "size 1"


@pytest.mark.parametrize(("launcher", "library"), [("mpich", "openmpi"), ("openmpi", "mpich")])
def test_a_launcher_of_another_library(launcher: str, library: str) -> None:
    prefix, variables = mpi_start(launcher, 2)
    other = mpi_start(library, 2)[1]["MPI4PY_LIBMPI"]
    variables.pop("OPAL_PREFIX", None)
    done = run(prefix, INIT, **{**variables, "MPI4PY_LIBMPI": other})
    assert done.returncode != 0
    assert "size" not in done.stdout
    # MPICH ends a process under the other launcher, after our warning. Open MPI starts two jobs of one rank each.
    assert ("but mpi4py uses MPICH" if library == "mpich" else "mpi4py says rank 0 of 1") in done.stderr
    assert "pip install mpich" in done.stderr


def test_a_thread_level_too_low() -> None:
    prefix, variables = mpi_start("mpich", 2)
    done = run(prefix, "import mpi4py; mpi4py.rc.thread_level = 'funneled'; " + INIT, **variables)
    assert done.returncode != 0
    assert "MPI was initialised with THREAD_FUNNELED" in done.stderr


def test_serialized_is_enough() -> None:
    prefix, variables = mpi_start("mpich", 2)
    done = run(prefix, "import mpi4py; mpi4py.rc.thread_level = 'serialized'; " + INIT, **variables)
    assert done.stdout == "size 2" * 2, done.stderr


def test_engines_that_differ() -> None:
    prefix, variables = mpi_start("mpich", 2)
    program = "import os; os.environ['MULTIRING_ENGINE'] = ['mpi', 'auto'][int(os.environ['PMI_RANK'])]; " + INIT
    done = run(prefix, program, **variables)
    assert done.returncode != 0
    assert "MULTIRING_ENGINE differs" in done.stderr
    assert "{'auto': 1, 'mpi': 0}" in done.stderr


# -- deaths that the launcher must not notice before the survivors have reported them

DYING = "from tests.wire.test_mpi_engine import guard_one_of_three; guard_one_of_three()"


def guard_one_of_three() -> None:
    """Run as the process that Hydra started, with the rank as a child process.

    When Hydra misses a rank, it ends all ranks, even with -disable-auto-cleanup: its proxy fails as soon as it has a
    message for the lost rank. This parent holds the rank's connection to Hydra until both survivors have written their
    errors, so Hydra misses no rank before that.
    """
    stage, how, folder = sys.argv[1:]
    rank = os.fork()
    if rank == 0:
        be_one_of_three(stage, how, Path(folder))
        return
    _, status = os.waitpid(rank, 0)
    deadline = time.monotonic() + 240
    while len(told_in(Path(folder))) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    os._exit(0 if status == 0 else 1)


def be_one_of_three(stage: str, how: str, folder: Path) -> None:
    """Run to the stage where rank 1 gets the signal `how`. The other ranks record their errors, shut down and end."""
    rank = int(os.environ["PMI_RANK"])
    vars(importlib.import_module("multiring._runtime.job.joining"))["host_id"] = lambda: f"host {rank}"
    engine: Any = importlib.import_module("multiring._runtime.engines.mpi")
    number = signal.Signals[how]
    if stage == "init" and rank == 1:
        engine.MpiHere._duplicate = lambda *_: os.kill(os.getpid(), number)
    try:
        group = multiring.init(stall_warn_s=0.5, stall_timeout_s=4, init_timeout_s=60)
        array = np.ones(1_000_000, np.float32)
        group.all_reduce(array)
        if rank == 1:
            (folder / "pid").write_text(str(os.getpid()))
            threading.Timer(0.2, lambda: os.kill(os.getpid(), number)).start()
        while True:
            group.barrier() if stage == "barrier" else group.all_reduce(array, "average")
    except MultiringError as error:
        part = folder / f"part-{rank}"
        part.write_text(f"{type(error).__name__}: {error}")
        part.rename(folder / f"told-{rank}")  # a rename shows the finished file at once
    multiring.shutdown()


def told_in(folder: Path) -> list[str]:
    """Return the errors that survivors have recorded."""
    return [path.read_text() for path in sorted(folder.glob("told-*"))]


@pytest.mark.parametrize("stage", ["init", "collective", "barrier"])
def test_a_death_is_named(stage: str, tmp_path: Path) -> None:
    prefix, variables = mpi_start("mpich", 3)
    done = run(prefix, DYING, stage, "SIGKILL", str(tmp_path), **variables)
    assert done.returncode != 0
    told = told_in(tmp_path)
    assert len(told) == 2, done.stderr
    kind, text = ("RendezvousError", "was lost during init") if stage == "init" else ("PeerLostError", "rank 1 died")
    assert all(line.startswith(kind) and "rank 1" in line and text in line for line in told), told


def test_silence_ends_at_the_timeout_and_the_survivors_end_too(tmp_path: Path) -> None:
    """MPI_Finalize would wait forever for the silent rank, so one survivor ends without it."""
    prefix, variables = mpi_start("mpich", 3)
    kept = {name: text for name, text in os.environ.items() if not name.startswith("MULTIRING_")}
    with subprocess.Popen(
        [
            *prefix,
            sys.executable,
            "-c",
            DYING,
            "collective",
            "SIGSTOP",
            str(tmp_path),
        ],
        cwd=ROOT,
        env=kept | {"OMP_NUM_THREADS": "1", "MULTIRING_ENGINE": "mpi"} | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as job:
        assert job.stdout is not None
        lines: list[str] = []
        while not any("ending without it" in line for line in lines):  # one survivor's exit may free the other
            lines.append(job.stdout.readline())
            assert lines[-1], lines
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
        job.communicate(timeout=240)  # Hydra waits for every rank
    told = told_in(tmp_path)
    assert len(told) == 2
    assert all(line.startswith("StallError") and "nothing came from rank 1" in line for line in told), told
