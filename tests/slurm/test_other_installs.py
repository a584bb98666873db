"""Bad input under a real Slurm: another multiring or Python on a node, none, closed ports, a wrong number of tasks."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from tests.support import other_installs
from tests.support.slurm_cluster import SlurmCluster

SAY = "import multiring\nmultiring.init().barrier()\nprint('well', flush=True)\n"
PROGRAM = "/opt/programs/say.py"
OTHER_RELEASE = f"on Python {sys.version_info[0]}.{sys.version_info[1]}.99, and this host has"


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    with SlurmCluster(2, shared=True) as made:
        made.program("say.py", SAY)
        yield made


@contextmanager
def on_host(cluster: SlurmCluster, number: int, script: str) -> Iterator[None]:
    """Run a script as root on a host for a block, and undo its change."""
    cluster.root("sh", "-c", script, host=number)
    try:
        yield
    finally:
        cluster.root("sh", "-c", other_installs.undone(), host=number)


def refused(cluster: SlurmCluster, *command: str, limit_s: str = "12") -> str:
    """Return what a job of two nodes that must fail writes to the launching terminal."""
    job = cluster.user(*command, MULTIRING_INIT_TIMEOUT_S=limit_s)
    output, errors = job.communicate(timeout=240)
    assert job.returncode != 0, output
    assert "well" not in output
    cluster.wait_for_idle()
    return errors


@pytest.mark.parametrize(
    ("there", "words"),
    [
        (other_installs.other_multiring(), ["ranks run different multiring versions: ", "0.0.7 on rank 1"]),
        (other_installs.no_multiring(), ["ModuleNotFoundError: No module named 'multiring'", "rank 1 did not arrive"]),
        (other_installs.closed_python(), ["Permission denied", "rank 1 did not arrive"]),
    ],
    ids=["other version", "no multiring", "another user's Python"],
)
def test_srun_with_another_installation_on_a_node(cluster: SlurmCluster, there: str, words: list[str]) -> None:
    with on_host(cluster, 1, there):
        errors = refused(cluster, "srun", "--mpi=none", "-N2", "-n2", "python", PROGRAM)
    for word in words:
        assert word in errors


@pytest.mark.parametrize(
    ("there", "words"),
    [
        (other_installs.other_multiring(), "has multiring 0.0.7 on Python"),
        (other_installs.no_multiring(), "that Python has no multiring of this version: install it there"),
        (other_installs.other_python(), OTHER_RELEASE),
        (other_installs.closed_python(), "the user of this job must be able to execute this Python on every host"),
    ],
    ids=["other version", "no multiring", "other Python", "another user's Python"],
)
def test_multiring_run_with_another_installation_on_a_node(cluster: SlurmCluster, there: str, words: str) -> None:
    with on_host(cluster, 1, there):
        errors = refused(cluster, "salloc", "-N2", "-n2", "multiring", "run", PROGRAM)
    assert words in errors
    assert "node 1" in errors


def test_srun_with_ports_that_a_firewall_closes(cluster: SlurmCluster) -> None:
    command = ("srun", "--mpi=none", "-N2", "-n2", "sh", "-c", f"MULTIRING_PORTS=7500-7520 exec python {PROGRAM}")
    with on_host(cluster, 0, other_installs.closed_ports(7500, 7520)):
        errors = refused(cluster, *command)
    assert "a firewall may close this port: MULTIRING_PORTS=" in errors


def test_multiring_run_with_ports_that_a_firewall_closes(cluster: SlurmCluster) -> None:
    command = ("salloc", "-N2", "-n2", "sh", "-c", f"MULTIRING_PORTS=7500-7520 exec multiring run {PROGRAM}")
    with on_host(cluster, 0, other_installs.closed_ports(7500, 7520)):
        errors = refused(cluster, *command)
    assert "no answer within 12 s" in errors
    assert "MULTIRING_PORTS" in errors


@pytest.mark.parametrize("launcher", ["srun --mpi=none -N2 -n2 python", "salloc -N2 -n2 multiring run"])
def test_a_folder_that_is_not_shared(cluster: SlurmCluster, launcher: str) -> None:
    cluster.root("sh", "-c", f"mkdir -p /run/mine; printf '%s' \"{SAY}\" >/run/mine/say.py; chmod -R a+rX /run/mine")
    errors = refused(cluster, *launcher.split(), "/run/mine/say.py")
    assert "can't open file '/run/mine/say.py'" in errors


def test_a_program_without_srun_says_that_the_allocation_has_more_tasks(cluster: SlurmCluster) -> None:
    job = cluster.user("salloc", "-N2", "-n4", "python", PROGRAM)
    _, errors = job.communicate(timeout=240)
    assert "this process is a job of one rank, although its Slurm allocation has 4 tasks: start it with srun" in errors


def test_fewer_ranks_than_nodes_are_refused(cluster: SlurmCluster) -> None:
    errors = refused(cluster, "salloc", "-N2", "-n2", "multiring", "run", "-n", "1", PROGRAM)
    assert "-n 1: the allocation has 2 nodes, which need a rank each" in errors
