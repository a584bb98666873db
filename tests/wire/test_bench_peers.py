"""The workers of the other libraries: every collective is right, and missing collectives are reported.

The oracle is the workers' own check against NumPy; test_bench.py tests that check.
"""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from multiring._bench.peers import PEERS, command_of, python_of
from multiring._bench.workers.contract import COLLECTIVES, Case, write_cases
from multiring._settings import inherited_environment
from multiring.errors import LaunchError

MPIS = ("mpich", "openmpi")


def run(library: str, tmp_path: Path, ranks: int, **changes: Any) -> list[dict[str, Any]]:
    """Return each rank's answer to a small case; fail if the job failed."""
    (answers,) = run_all(library, tmp_path, ranks, [changes])
    return answers


def run_all(
    library: str, tmp_path: Path, ranks: int, cases: list[dict[str, Any]], worker: Path | None = None
) -> list[list[dict[str, Any]]]:
    """Return each rank's answer to each of several small cases of one job; fail if the job failed."""
    done = start(library, tmp_path, ranks, cases, worker)
    assert done.returncode == 0, done.stdout + done.stderr
    return [
        [json.loads((tmp_path / str(number) / f"rank-{rank}.json").read_text()) for rank in range(ranks)]
        for number in range(len(cases))
    ]


def start(
    library: str, tmp_path: Path, ranks: int, cases: list[dict[str, Any]], worker: Path | None = None
) -> subprocess.CompletedProcess[str]:
    fields: dict[str, Any] = {"collective": "all_reduce", "dtype": "float32", "count": 12 * 1024, "calls": 2}
    made = []
    for number, changes in enumerate(cases):
        (tmp_path / str(number)).mkdir(exist_ok=True)
        made.append(Case(library=library, out_dir=str(tmp_path / str(number)), **{**fields, **changes}))
    write_cases(made, tmp_path / "case.json")
    job = command_of(PEERS[library], ranks, worker or PEERS[library].worker, tmp_path / "case.json")
    environment = inherited_environment() | dict(job.variables)
    return subprocess.run(job.command, env=environment, capture_output=True, text=True, timeout=240, check=False)


def assert_timed(answers: list[dict[str, Any]], calls: int = 2) -> None:
    for answer in answers:
        assert len(answer["seconds"]) == calls, answer
        assert all(second > 0 for second in answer["seconds"])
        assert answer["version"]
        assert all(isinstance(text, str) for text in answer["settings"].values())


@pytest.mark.parametrize("mpi", MPIS)
def test_every_collective_of_an_mpi(mpi: str, tmp_path: Path) -> None:
    # Three ranks are no power of two and more than the cores of some machines. Both cases need special settings.
    cases = [{"collective": each, "root": 2 if each == "broadcast" else 0} for each in COLLECTIVES]
    for answers in run_all(mpi, tmp_path, 3, cases):
        assert_timed(answers)


@pytest.mark.parametrize("mpi", MPIS)
def test_a_pool_of_an_mpis_own_memory(mpi: str, tmp_path: Path) -> None:
    (answer, _) = run(mpi, tmp_path, 2, buffers="arena", pool_bytes=3 * 48 * 1024, op="max", dtype="int64")
    assert answer["settings"]["buffers"] == "MPI_IN_PLACE"


@pytest.mark.parametrize("mpi", MPIS)
def test_what_was_set_is_in_the_result(mpi: str, tmp_path: Path) -> None:
    answers = run(mpi, tmp_path, 2, count=16, cores=(0,))
    wanted = {"mpich": "MPIR_CVAR_CH4_PROGRESS_THROTTLE", "openmpi": "mpi_yield_when_idle"}[mpi]
    assert [answer["settings"][wanted] for answer in answers] == ["1", "1"]
    assert {"mpich": "MPICH", "openmpi": "Open MPI"}[mpi] in answers[0]["version"]


@pytest.mark.parametrize("mpi", MPIS)
def test_an_mpi_moves_bfloat16_but_does_not_reduce_it(mpi: str, tmp_path: Path) -> None:
    cases = [{"dtype": "bfloat16"}, {"collective": "all_gather", "dtype": "bfloat16"}]
    refused, moved = run_all(mpi, tmp_path, 2, cases)
    assert refused == [{"not_offered": "this MPI has no bfloat16 to reduce"}] * 2
    assert_timed(moved)


def test_an_mpi_has_no_average(tmp_path: Path) -> None:
    assert run("mpich", tmp_path, 2, op="average") == [{"not_offered": "MPI has no operation average"}] * 2


@pytest.mark.parametrize("mpi", MPIS)
def test_a_rank_that_fails_ends_the_job(mpi: str, tmp_path: Path) -> None:
    worker = tmp_path / "worker.py"
    worker.write_text(
        "from mpi4py import MPI\n"
        "if MPI.COMM_WORLD.rank == 1:\n"
        "    raise SystemExit('wrong sums on rank 1')\n"
        "MPI.COMM_WORLD.Barrier()\n"
    )
    done = start(mpi, tmp_path, 2, [{}], worker)
    assert done.returncode != 0
    assert "wrong sums on rank 1" in done.stdout + done.stderr


# -- the window


def test_the_sum_by_hand_over_a_shared_window(tmp_path: Path) -> None:
    # Ranks without a slice; uneven slices of several pieces.
    cases = [{"count": count, "dtype": "float64", "pool_bytes": 2 * count * 8} for count in (1, 3, 100_003)]
    for answers in run_all("mpich_window", tmp_path, 3, cases):
        assert_timed(answers)


def test_other_operations_by_hand(tmp_path: Path) -> None:
    cases = [{"op": op, "dtype": "int32"} for op in ("min", "max", "product")]
    for answers in run_all("openmpi_window", tmp_path, 2, cases):
        assert_timed(answers)


def test_what_is_not_written_by_hand(tmp_path: Path) -> None:
    why = {
        "only all_reduce is written by hand, not broadcast": {"collective": "broadcast"},
        "NumPy alone has no sum of bfloat16": {"dtype": "bfloat16"},
        "NumPy alone has no average of float32": {"op": "average"},
    }
    found = run_all("mpich_window", tmp_path, 2, list(why.values()))
    assert found == [[{"not_offered": each}] * 2 for each in why]
    alone = {"not_offered": "one rank has no other rank to share a window with"}
    assert run("mpich_window", tmp_path, 1) == [alone]


# -- Horovod


@pytest.fixture
def horovod() -> str:
    """Return "horovod", or skip the test if Horovod is missing. Its installation takes minutes and gigabytes."""
    try:
        python_of(PEERS["horovod"])
    except LaunchError as error:
        pytest.skip(str(error))
    return "horovod"


@pytest.mark.parametrize("collective", ["all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all"])
def test_every_collective_of_horovod(horovod: str, collective: str, tmp_path: Path) -> None:
    answers = run(horovod, tmp_path, 2, collective=collective, pool_bytes=2 * 48 * 1024, cores=(0,))
    assert_timed(answers)
    assert answers[0]["settings"]["HOROVOD_CYCLE_TIME"] == "0.1"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"collective": "barrier"}, "Horovod has a barrier for PyTorch, not for TensorFlow"),
        ({"dtype": "bfloat16"}, "Horovod has no bfloat16 among its types"),
        ({"collective": "reduce_scatter", "op": "max"}, "Horovod's reducescatter has no max"),
    ],
)
def test_what_horovod_does_not_have(horovod: str, changes: dict[str, Any], why: str, tmp_path: Path) -> None:
    assert run(horovod, tmp_path, 2, **changes) == [{"not_offered": why}] * 2
