"""The Slurm of the tests is what they take it for: three hosts, an ordinary user, folders apart or shared."""

from collections.abc import Iterator

import pytest
from tests.support.slurm_cluster import HOME, USER, SlurmCluster


@pytest.fixture(scope="module", params=[False, True], ids=["apart", "shared"])
def cluster(request: pytest.FixtureRequest) -> Iterator[SlurmCluster]:
    with SlurmCluster(shared=request.param) as made:
        yield made


def test_a_step_runs_on_three_hosts_as_an_ordinary_user(cluster: SlurmCluster) -> None:
    said = cluster.run("srun", "-N3", "-n3", "sh", "-c", "hostname; id -un; pwd").split("\n")
    assert sorted(said) == sorted(["", *(f"host{each}" for each in range(3)), *[USER, HOME] * 3])


@pytest.mark.parametrize("folder", [HOME, "/tmp"])  # noqa: S108 -- of the hosts
def test_a_file_of_one_host_is_on_the_others_where_folders_are_shared(cluster: SlurmCluster, folder: str) -> None:
    cluster.run("touch", f"{folder}/here", host=1)
    found = cluster.run("sh", "-c", f"ls {folder}", host=2).split()
    assert ("here" in found) == cluster.is_shared


def test_the_user_cannot_write_programs_or_read_the_key(cluster: SlurmCluster) -> None:
    said = cluster.run("sh", "-c", f"touch /opt/programs/x; cat {cluster.folder}/munge.key; echo $?")
    assert said == "1\n"
