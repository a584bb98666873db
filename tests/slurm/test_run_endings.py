"""How jobs of `multiring run` in an allocation of Slurm end: ranks, daemons and hosts that die, signals, requeue."""

import signal
import time
from collections.abc import Iterator

import pytest
from tests.support.slurm_cluster import HOME, SlurmCluster
from tests.support.slurm_training import TRAIN, check_requeue, job_number, steps_in

RUN = ("multiring", "run")
LONG = ("100000", "0.05")


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    with SlurmCluster(shared=True) as made:
        made.program("train.py", TRAIN)
        yield made


def train(name: str, *words: str) -> tuple[str, ...]:
    """Return the words after `multiring run` for a training that saves to a file with this name."""
    return ("/opt/programs/train.py", *(words or LONG), f"{HOME}/{name}")


def batch(cluster: SlurmCluster, name: str, *options: str, prefix: str = "") -> str:
    """Submit a batch script with a long training, wait until it is at work, and return the job's number."""
    text = f"#!/bin/sh\n{prefix}multiring run {' '.join(train(name))}\necho code $?\n"
    script = cluster.program(f"{name}.sh", text)
    number = job_number(cluster.run("sbatch", "-N2", "-n2", *options, f"--output={name}.out", script))
    cluster.wait_for(lambda: steps_in(cluster, name) > 2)
    return number


def nothing_left(cluster: SlurmCluster, *numbers: int) -> None:
    """Assert that no process of a job is left on the hosts."""
    look = ("sh", "-c", "pgrep -fa '[m]ultiring run|[h]ost_agent|programs/[t]rain.py' || true")
    for number in numbers or range(3):
        cluster.wait_for(lambda number=number: not cluster.root(*look, host=number))  # type: ignore[misc]


@pytest.mark.parametrize("mpi", ["none", "pmi2", "pmix"])
def test_a_killed_rank_is_named_in_a_shell_of_salloc(cluster: SlurmCluster, mpi: str) -> None:
    cluster.set_mpi(mpi)
    name = f"rank-{mpi}"
    job = cluster.user("salloc", "-N2", "-n2", *RUN, *train(name))
    cluster.wait_for(lambda: steps_in(cluster, name) > 2)
    (pid,) = cluster.root("pgrep", "-f", f"programs/[t]rain.py.*{name}", host=1).split()
    cluster.root("kill", "-9", pid, host=1)
    errors = job.communicate(timeout=240)[1]
    assert job.returncode == 137, errors
    assert f"multiring: rank 1 (pid {pid} on node 1 (host1)) failed: killed by SIGKILL" in errors
    nothing_left(cluster)


def test_a_job_goes_on_without_a_daemon_of_slurm(cluster: SlurmCluster) -> None:
    job = cluster.user("salloc", "-N2", "-n2", *RUN, *train("daemon", "60", "0.1"))
    cluster.wait_for(lambda: steps_in(cluster, "daemon") > 2)
    cluster.kill_slurmd(1)
    cluster.wait_for(lambda: steps_in(cluster, "daemon") == 60)
    cluster.start_slurmd(1)
    output, errors = job.communicate(timeout=240)
    assert job.returncode == 0, errors
    assert output.count("ends with") == 2
    cluster.wait_for_idle()


def test_scancel_leaves_time_to_save(cluster: SlurmCluster) -> None:
    number = batch(cluster, "cancelled")
    cluster.run("scancel", number)
    cluster.wait_for(lambda: number not in cluster.jobs(), 120)
    said = cluster.run("cat", f"{HOME}/cancelled.out")
    assert said.count(": stops") == 2, said
    nothing_left(cluster)


def test_the_time_limit_with_a_signal_or_without_leaves_time_to_save(cluster: SlurmCluster) -> None:
    numbers = [
        # Slurm sends the signal up to 30 s early, which is 60 s after the start, when all ranks listen.
        batch(cluster, "told-steps", "--time=2", "--signal=USR1@30"),
        batch(cluster, "told-script", "--time=2", "--signal=B:USR1@30", prefix="exec "),
        batch(cluster, "limit", "--time=1"),
    ]
    cluster.wait_for(lambda: not {*numbers} & {*cluster.jobs()}, 200)
    for name in ("told-steps", "told-script", "limit"):
        said = cluster.run("cat", f"{HOME}/{name}.out")
        assert said.count(": stops") == 2, said
        assert "killing ranks" not in said, said
        assert name != "told-steps" or "code 0" in said
    nothing_left(cluster)


def test_a_requeued_job_resumes_to_the_same_weights(cluster: SlurmCluster) -> None:
    check_requeue(cluster, "multiring run")


def test_two_jobs_at_once_are_kept_apart(cluster: SlurmCluster) -> None:
    names = ("first", "second")
    jobs = [cluster.user("salloc", "-N2", "-n2", *RUN, *train(name, "20", "0.1")) for name in names]
    for job in jobs:
        output, errors = job.communicate(timeout=240)
        assert job.returncode == 0, errors
        assert output.count("ends with") == 2
    assert cluster.run("cat", f"{HOME}/first") == cluster.run("cat", f"{HOME}/second")


def test_a_killed_launcher_leaves_nothing(cluster: SlurmCluster) -> None:
    job = cluster.user("salloc", "-N2", "-n2", *RUN, *train("launcher"))
    cluster.wait_for(lambda: steps_in(cluster, "launcher") > 2)
    pid = cluster.root("pgrep", "-f", "[m]ultiring run").split()[-1]
    cluster.root("kill", f"-{signal.SIGKILL:d}", pid)
    job.communicate(timeout=240)
    nothing_left(cluster)


def test_a_killed_host_is_named_in_time_and_the_others_end(cluster: SlurmCluster) -> None:
    # Without --no-kill Slurm itself ends the job when it finds the host dead.
    job = cluster.user("salloc", "--no-kill", "-N3", "-n3", *RUN, *train("host"))
    cluster.wait_for(lambda: steps_in(cluster, "host") > 2)
    began = time.monotonic()
    cluster.kill_host(2)
    errors = job.communicate(timeout=240)[1]
    took_s = time.monotonic() - began
    assert job.returncode == 137, errors
    assert "rank 2 (pid" in errors
    assert "on node 2 (host2)) failed: its host was lost" in errors
    assert took_s < 100, errors  # the kernel itself would take a quarter of an hour
    nothing_left(cluster, 0, 1)
