"""How jobs under Slurm end: killed ranks, daemons and hosts, scancel, signals, requeue; and who can read the secret."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support import secret_search
from tests.support.slurm_cluster import HOME, USER_NUMBER, SlurmCluster
from tests.support.slurm_training import TRAIN, check_requeue, job_number, steps_in


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    with SlurmCluster(shared=True) as made:
        made.program("train.py", TRAIN)
        yield made


def test_a_killed_rank_is_named(cluster: SlurmCluster) -> None:
    job = cluster.user("srun", "-N2", "-n2", "python", "/opt/programs/train.py", "100000", "0.05", f"{HOME}/killed")
    cluster.wait_for(lambda: steps_in(cluster, "killed") > 2)
    pids = cluster.root("pgrep", "-f", "programs/train.py.*killed", host=1).split()
    cluster.root("kill", "-9", *pids, host=1)
    errors = job.communicate(timeout=240)[1]
    assert job.returncode != 0
    assert "PeerLostError" in errors
    assert "rank 1" in errors


def test_a_job_goes_on_without_a_daemon_of_slurm(cluster: SlurmCluster) -> None:
    job = cluster.user("srun", "-N2", "-n2", "python", "/opt/programs/train.py", "60", "0.1", f"{HOME}/daemon")
    cluster.wait_for(lambda: steps_in(cluster, "daemon") > 2)
    cluster.kill_slurmd(1)
    cluster.wait_for(lambda: steps_in(cluster, "daemon") == 60)
    cluster.start_slurmd(1)
    output, errors = job.communicate(timeout=240)
    assert job.returncode == 0, errors
    assert output.count("ends with") == 2


def test_scancel_and_the_time_limit_with_a_signal_or_without_leave_time_to_save(cluster: SlurmCluster) -> None:
    # Slurm looks every 30 s, and sends the signal up to 30 s early: 60 s after the start, when all ranks listen.
    limits = {"cancelled": (), "told": ("--time=2", "--signal=USR1@30"), "limit": ("--time=1",)}
    numbers = {}
    for name, options in limits.items():
        text = f"#!/bin/sh\nsrun python /opt/programs/train.py 100000 0.05 {HOME}/{name}\n"
        script = cluster.program(f"{name}.sh", text)
        numbers[name] = job_number(cluster.run("sbatch", "-N2", "-n2", *options, "-o", f"{name}.out", script))
    for name in limits:
        cluster.wait_for(lambda name=name: steps_in(cluster, name) > 2)  # type: ignore[misc]
    cluster.run("scancel", numbers["cancelled"])
    cluster.wait_for(lambda: not {*numbers.values()} & {*cluster.jobs()}, 200)
    for name in limits:
        assert cluster.run("cat", f"{HOME}/{name}.out").count("stops") == 2, name


def test_a_requeued_job_resumes_to_the_same_weights(cluster: SlurmCluster) -> None:
    check_requeue(cluster, "srun python")


@pytest.mark.parametrize("launcher", ["srun --mpi=none", "srun --mpi=pmi2", "srun --mpi=pmix", "salloc"])
def test_the_secret_is_in_no_command_line_or_environment_or_file_of_others(
    cluster: SlurmCluster, launcher: str
) -> None:
    cluster.program("show.py", secret_search.SHOW)
    look = cluster.program("look.py", Path(secret_search.__file__).read_text("utf-8"))
    by_run = launcher == "salloc"
    program = ("multiring", "run") if by_run else ("python",)
    job = cluster.user(*launcher.split(), "-N2", "-n2", *program, "/opt/programs/show.py", "/none")
    assert job.stdout is not None
    secret = job.stdout.readline().removeprefix("[0] ").strip()
    if by_run:  # it gives the ranks a text in their environment, as their secret
        secret = bytes.fromhex(secret).decode()
    owners = (str(USER_NUMBER),) if by_run else ()
    try:
        assert len(secret) == 64
        for host in range(2):
            assert json.loads(cluster.root("python3", look, secret, *owners, host=host)) == []
        # The look finds what it looks for.
        assert json.loads(cluster.root("env", f"X={secret}", "sh", "-c", f"sleep 3 & python3 {look} {secret}; true"))
    finally:
        if by_run:  # salloc waits for the command even if it gets SIGTERM
            cluster.root("pkill", "-f", "[m]ultiring run")
        job.terminate()
        errors = job.communicate(timeout=240)[1]
    assert secret not in errors
    for host in range(2):  # a process of Slurm's may take a moment to remove its files
        cluster.wait_for(lambda host=host: cluster.root("python3", look, "--left", secret, host=host) == "[]\n")  # type: ignore[misc]


def test_a_killed_host_is_named_in_time(cluster: SlurmCluster) -> None:
    job = cluster.user("srun", "-N3", "-n3", "python", "/opt/programs/train.py", "100000", "0.05", f"{HOME}/host")
    cluster.wait_for(lambda: steps_in(cluster, "host") > 2)
    began = time.monotonic()
    cluster.kill_host(2)
    errors = job.communicate(timeout=240)[1]
    assert job.returncode != 0
    assert "host2" in errors
    assert time.monotonic() - began < 100, errors  # the kernel itself would take a quarter of an hour
