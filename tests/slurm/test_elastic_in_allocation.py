"""`multiring run --min-ranks` in an allocation of a real Slurm: ranks and nodes are lost, and newcomers come."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from tests.support.elastic_scripts import SUMS, ends_in
from tests.support.slurm_cluster import HOME, SlurmCluster

if TYPE_CHECKING:
    import subprocess

SCRIPT = "/opt/programs/train.py"
RUN = ("multiring", "run", "--min-ranks", "2")


@pytest.fixture
def cluster() -> Iterator[SlurmCluster]:
    with SlurmCluster(shared=True) as made:
        made.program("train.py", SUMS)
        yield made


def wait_for_size(job: "subprocess.Popen[str]", size: int) -> None:
    """Wait until a rank has begun to train with so many ranks."""
    assert job.stdout is not None
    for line in job.stdout:
        if f"SIZE {size} " in line:
            return
    pytest.fail(f"the job ended without {size} ranks: {job.communicate()[1]}")


def test_lost_ranks_are_replaced_and_the_job_goes_on_without_a_lost_node(cluster: SlurmCluster) -> None:
    job = cluster.user("salloc", "--no-kill", "-N3", "--ntasks-per-node=2", *RUN, "--max-ranks", "6", SCRIPT)
    wait_for_size(job, 6)
    cluster.root("sh", "-c", f"sleep 2; pkill -9 -n -f {SCRIPT}$", host=1)
    wait_for_size(job, 5)
    wait_for_size(job, 6)  # the newcomer is on host1
    cluster.kill_host(2)
    wait_for_size(job, 4)
    cluster.run("touch", f"{HOME}/stop")
    out, err = job.communicate(timeout=240)
    assert job.returncode == 0, err
    told = ends_in(out)
    assert sorted(rank for _, rank, *_ in told) == [0, 1, 2, 3], err
    assert all(is_right for _, _, is_right, _ in told), (told, err)
    assert "rank 6 is started as a newcomer on node 1 (host1)" in err
    # The ranks may hear of the loss, and end the job, before the launcher does: then it is told with the job's end.
    assert "node 2 (host2) was lost" in err or "its host was lost" in err, err


def test_scancel_ends_the_job_and_sigterm_to_a_rank_does_not(cluster: SlurmCluster) -> None:
    code, _, err = refused(cluster, "--max-ranks", "5")
    assert code == 2
    assert "--max-ranks 5, but node 0:2,node 1:2 has places for 4; want more places" in err
    cluster.program("job.sh", f"#!/bin/sh\n{' '.join(RUN)} {SCRIPT}\necho code $?\n")
    number = cluster.run("sbatch", "-N2", "--ntasks-per-node=2", "--output=job.out", "/opt/programs/job.sh").split()[-1]
    cluster.wait_for(lambda: "SIZE 4" in said(cluster))
    cluster.root("sh", "-c", f"sleep 2; pkill -TERM -n -f {SCRIPT}$", host=1)
    cluster.wait_for(lambda: "SIZE 3" in said(cluster) and "has left, because it got SIGTERM" in said(cluster))
    cluster.run("scancel", number)
    cluster.wait_for(lambda: number not in cluster.jobs(), 120)
    assert "SIGTERM received" in said(cluster)
    look = ("sh", "-c", f"pgrep -fa '[m]ultiring run|[h]ost_agent|{SCRIPT[:-1]}[y]$' || true")
    for host in range(2):
        cluster.wait_for(lambda host=host: not cluster.root(*look, host=host))  # type: ignore[misc]


@pytest.mark.parametrize("victim", [0, 3])
def test_under_plain_srun_the_others_wait_for_a_killed_rank_and_end(cluster: SlurmCluster, victim: int) -> None:
    job = cluster.user("srun", "-N2", "-n4", "--label", "python", SCRIPT, MULTIRING_INIT_TIMEOUT_S="15")
    wait_for_size(job, 4)
    environ = f"SLURM_PROCID={victim}"
    find = (
        f"for each in $(pgrep -f {SCRIPT}$); do grep -qz ^{environ}$ /proc/$each/environ && kill -9 $each; done; true"
    )
    cluster.root("sh", "-c", f"sleep 2; {find}", host=victim // 2)
    out, err = job.communicate(timeout=240)
    assert job.returncode != 0, (out, err)
    assert "END" not in out
    for rank in set(range(4)) - {victim}:
        mine = "\n".join(line for line in err.splitlines() if line.startswith(f"{rank}: "))
        assert f"rank {victim}" in mine, err
        assert "RendezvousError" in mine or "PeerLostError" in mine, err


def refused(cluster: SlurmCluster, *words: str) -> tuple[int, str, str]:
    job = cluster.user("salloc", "-N2", "--ntasks-per-node=2", *RUN, *words, SCRIPT)
    out, err = job.communicate(timeout=240)
    return job.returncode, out, err


def said(cluster: SlurmCluster) -> str:
    return cluster.run("sh", "-c", f"cat {HOME}/job.out 2>/dev/null || true")
