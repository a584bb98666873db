"""`multiring run` in a batch script of a real Slurm: all nodes of the allocation, with nothing set."""

from collections.abc import Iterator

import pytest
from tests.support.slurm_cluster import SlurmCluster

PROGRAM = """
import os, sys
import numpy as np, multiring
group = multiring.init()
total = np.ones(1)
group.all_reduce(total)
print(f"rank {group.rank} of {total[0]:g} on {os.uname().nodename}", flush=True)
if "fail" in sys.argv and group.rank == 2:
    sys.exit(5)
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    with SlurmCluster(shared=True) as made:
        yield made


def batch(cluster: SlurmCluster, words: str, *options: str) -> tuple[str, str]:
    """Run a batch script with `multiring run`; return its output and its exit code's line."""
    text = f"#!/bin/sh\ncat > program.py <<'END'\n{PROGRAM}\nEND\nmultiring run {words}\necho code $?\n"
    cluster.run("sh", "-c", f"cat > job.sh <<'STOP'\n{text}\nSTOP")
    cluster.run("sbatch", "--wait", "--output=job.out", *options, "job.sh")
    *lines, code = cluster.run("cat", "job.out").splitlines()
    return "\n".join(lines), code


def test_all_nodes_of_an_allocation(cluster: SlurmCluster) -> None:
    said, code = batch(cluster, "program.py", "-N3", "--ntasks-per-node=2")
    assert code == "code 0", said
    assert "multiring: 6 ranks on the 3 nodes of Slurm job" in said
    ranks = sorted(line for line in said.splitlines() if line.startswith("["))
    assert ranks == [f"[{rank}] rank {rank} of 6 on host{rank // 2}" for rank in range(6)]


def test_a_number_of_ranks_is_spread_and_a_failure_is_named(cluster: SlurmCluster) -> None:
    said, code = batch(cluster, "-n 3 program.py fail", "-N2", "--ntasks-per-node=2")
    assert code == "code 5", said
    assert "3 ranks on the 2 nodes of Slurm job" in said
    assert "rank 2 (pid" in said
    assert "failed: exit code 5" in said


def test_here_stays_on_this_node(cluster: SlurmCluster) -> None:
    said, code = batch(cluster, "--here -n 2 program.py", "-N2", "--ntasks-per-node=2")
    assert code == "code 0", said
    hosts = {line.split()[-1] for line in said.splitlines() if line.startswith("[")}
    assert len(hosts) == 1
