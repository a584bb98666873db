"""Jobs of Slurm whose host dies are requeued, and resume to the same weights on other hosts."""

from tests.support.slurm_cluster import HOME, SlurmCluster
from tests.support.slurm_training import AGAIN, TRAIN, endings_of, job_number, steps_in

STEPS = "/opt/programs/train.py 120 0.1"
LAUNCHERS = {"srun": "srun python", "run": "multiring run"}


def final(cluster: SlurmCluster, name: str) -> set[str]:
    return {line for line in endings_of(cluster, name) if line.startswith("ends with")}


def test_a_job_whose_host_dies_is_requeued_and_resumes_to_the_same_weights() -> None:
    with SlurmCluster(shared=True) as cluster:
        cluster.program("train.py", TRAIN)
        for name, launcher in LAUNCHERS.items():
            cluster.program(f"{name}.sh", f"#!/bin/sh\n{launcher} {STEPS} {HOME}/{name} || {{ {AGAIN}; }}\n")
        cluster.run("srun", "-N2", "-n2", "sh", "-c", f"python {STEPS} {HOME}/whole >>{HOME}/whole.out")
        options = ("-N2", "-n2", "--nodelist=host1,host2", "--requeue", "--open-mode=append")
        numbers = {
            name: job_number(cluster.run("sbatch", *options, f"--output={name}.out", f"/opt/programs/{name}.sh"))
            for name in LAUNCHERS
        }
        cluster.wait_for(lambda: all(steps_in(cluster, name) > 5 for name in LAUNCHERS))
        cluster.kill_host(2)
        for number in numbers.values():
            cluster.wait_for(lambda number=number: "PENDING" in cluster.root("scontrol", "show", "job", number), 120)  # type: ignore[misc]
            cluster.root("scontrol", "update", f"jobid={number}", "StartTime=now", "ReqNodeList=")
        cluster.wait_for(lambda: not {*numbers.values()} & {*cluster.jobs()}, 200)
        for name in LAUNCHERS:
            begins = {line for line in endings_of(cluster, name) if line.startswith("begins at")}
            assert len(begins) == 2, begins
            assert len(final(cluster, name)) == 1
            assert final(cluster, name) == final(cluster, "whole")
