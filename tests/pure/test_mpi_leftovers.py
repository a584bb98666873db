"""A run of the tests removes what its killed jobs of MPI have left, and nothing else."""

import mmap
from pathlib import Path

from tests.support.mpi_leftovers import files_of_mpi, remove_leftovers


def test_only_new_files_of_ended_jobs_are_removed(tmp_path: Path) -> None:
    (tmp_path / "mpich_shm_before_0").touch()
    known = files_of_mpi(tmp_path)
    for name in ("mpich_shm_1a_0", "sm_segment.host.0.1.0", "somebody's"):
        (tmp_path / name).touch()
    used = tmp_path / "mpich_shm_used_0"
    used.write_bytes(b"memory")
    with used.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ):
        remove_leftovers(known, tmp_path)
    assert {each.name for each in tmp_path.iterdir()} == {"mpich_shm_before_0", "mpich_shm_used_0", "somebody's"}
