"""A training for the tests of Slurm, and what they ask about it."""

from tests.support.slurm_cluster import HOME, SlurmCluster

# What a batch script does after a failure, to be started again on other hosts.
AGAIN = "[ ${SLURM_RESTART_COUNT:-0} -lt 3 ] && scontrol requeue $SLURM_JOB_ID"
# A training of 60 steps whose state depends on every step. It saves each state, and begins at the last one. It stops
# when it is told to, and says how it has ended.
TRAIN = """
import os, signal, sys, time
import numpy as np, multiring
from pathlib import Path
steps, pause_s, path = int(sys.argv[1]), float(sys.argv[2]), Path(sys.argv[3])
asked = []
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, lambda number, frame: asked.append(number))
group = multiring.init()
state = np.zeros(4)
first = 0
if path.exists():
    first, *values = path.read_text().split()
    first, state = int(first), np.array(list(map(float.fromhex, values)))
def say(text):
    sys.stdout.write(f"{group.rank}: {text}\\n")
    sys.stdout.flush()
say(f"begins at {first}")
for step in range(first, steps):
    gradient = np.cos(state + group.rank + step)
    group.all_reduce(gradient)
    state -= 0.1 * gradient
    stop = np.array([bool(asked)], np.uint8)
    group.all_reduce(stop, "max")
    if group.rank == 0:
        new = path.with_suffix(".new")
        new.write_text(" ".join([str(step + 1), *(value.hex() for value in state)]))
        new.replace(path)
    if stop[0]:
        say("stops")
        sys.exit(0)
    time.sleep(pause_s)
say("ends with " + " ".join(value.hex() for value in state))
"""


def steps_in(cluster: SlurmCluster, name: str) -> int:
    return int((cluster.run("sh", "-c", f"cat {HOME}/{name} 2>/dev/null || echo 0").split() or ["0"])[0])


def job_number(text: str) -> str:
    return text.rsplit(maxsplit=1)[-1]


def endings_of(cluster: SlurmCluster, name: str) -> set[str]:
    """Return what the ranks of a job have said, without their numbers."""
    lines = cluster.run("cat", f"{HOME}/{name}.out").splitlines()
    return {line.partition(": ")[2] for line in lines if "begins at" in line or "ends with" in line}


def check_requeue(cluster: SlurmCluster, launcher: str) -> None:
    """Run one training as a whole, and the same beside it with a requeue; assert that both end with equal weights."""
    whole, again = (f"{kind}-{launcher.partition(' ')[0]}" for kind in ("whole", "again"))
    scripts = {}
    for name in (whole, again):
        text = f"#!/bin/sh\n{launcher} /opt/programs/train.py 60 0.2 {HOME}/{name}\n"
        scripts[name] = cluster.program(f"{name}.sh", text)
    options = ("-N2", "-n2", "--requeue", "--open-mode=append")
    numbers = [job_number(cluster.run("sbatch", *options, f"--output={name}.out", scripts[name])) for name in scripts]
    cluster.wait_for(lambda: steps_in(cluster, again) > 5)
    cluster.run("scontrol", "requeue", numbers[1])
    cluster.wait_for(lambda: "PENDING" in cluster.root("scontrol", "show", "job", numbers[1]))
    cluster.root("scontrol", "update", f"jobid={numbers[1]}", "StartTime=now")  # Slurm waits two minutes otherwise
    cluster.wait_for(lambda: not {*numbers} & {*cluster.jobs()}, 150)
    ends = {name: endings_of(cluster, name) for name in scripts}
    begins = {line for line in ends[again] if line.startswith("begins at")}
    assert len(begins) == 2, ends
    assert "begins at 0" in begins
    final = {name: {line for line in said if line.startswith("ends with")} for name, said in ends.items()}
    assert len(final[whole]) == 1, ends
    assert final[again] == final[whole]
