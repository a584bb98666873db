"""`srun multiring doctor` checks all nodes of a step, whose ranks are told nothing but Slurm's variables."""

import json
import sys
from collections.abc import Iterator

import pytest
from tests.support.slurm_cluster import SlurmCluster


@pytest.fixture
def cluster() -> Iterator[SlurmCluster]:
    with SlurmCluster(shared=True) as made:
        yield made


def test_all_nodes_of_a_step_are_checked(cluster: SlurmCluster) -> None:
    words = (sys.executable, "-m", "multiring", "doctor", "--need-shm", "0", "--need-files", "64", "--json")
    said = cluster.run("sh", "-c", f"srun -N2 -n4 {' '.join(words)} || test $? = 1")
    (line,) = [line for line in said.splitlines() if '"findings"' in line]
    report = json.loads(line)
    assert [each for each in report["findings"] if each["kind"] not in ("busy", "oversubscribed")] == []
    assert len(report["hosts"]) == 2
    assert sum(host["ranks"] for host in report["hosts"]) == 4
    assert len([pair for pair in report["pairs"] if pair["bytes_per_s"]]) == 2
