"""A driver program of a Ray or Dask cluster, which kills.py attacks; it runs in one of the lab's hosts.

    python -m benchmarks.evidence.launching.cluster_driver ray|dask ADDRESS FOLDER RANKS STEPS

It runs a job of RANKS ranks, and then a second, short one in the same session. It prints a line of JSON for the end of
each. The ranks write the file FOLDER/at-work-RANK once they have met. A rank raises once its file FOLDER/raise-RANK is
there. Every rank leaves a detached child process. With ADDRESS alone, the program prints what the cluster still keeps.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

import multiring

CHILD = "4326"  # the seconds that a rank's child sleeps; the search for leftovers finds the child by this number
RANKS, SHORT = 4, 3
START_S = 90.0
Run = Callable[..., list[Any]]


def work(folder: str, steps: int) -> int:
    """Train for a number of steps, as far as a launcher can tell."""
    subprocess.Popen(["/bin/sleep", CHILD], start_new_session=True)  # noqa: S603 -- a number
    group = multiring.init()
    (Path(folder) / f"at-work-{group.rank}").touch()
    for _ in range(steps):
        total = np.full(1000, group.rank + 1.0)
        group.all_reduce(total)
        if total[0] != group.size * (group.size + 1) / 2:
            raise AssertionError(f"a wrong sum: {total[0]}")
        if (Path(folder) / f"raise-{group.rank}").exists():
            raise ZeroDivisionError(f"rank {group.rank} divides")
        time.sleep(0.02)
    return group.rank


@contextmanager
def session(framework: str, address: str) -> Iterator[Run]:
    """Connect to a cluster, and give a function that runs a function on ranks."""
    if framework == "dask":
        from distributed import Client  # noqa: PLC0415 -- only one of the frameworks is there

        import multiring.dask  # noqa: PLC0415 -- as above

        with Client(address) as client:
            yield lambda function, ranks, *args: multiring.dask.run(
                client, function, ranks, args, start_timeout_s=START_S
            )
    else:
        import ray  # noqa: PLC0415 -- as above

        import multiring.ray  # noqa: PLC0415 -- as above

        ray.init(address=address)
        yield lambda function, ranks, *args: multiring.ray.run(
            function, ranks, args, placement="SPREAD", start_timeout_s=START_S
        )


def report(name: str, job: Callable[[], Any]) -> None:
    """Run a job, and print how it ended."""
    ending: dict[str, Any] = {"job": name}
    try:
        ending["result"] = job()
    except Exception as error:  # noqa: BLE001 -- the attacker judges every error
        ending |= {"error": type(error).__name__, "text": str(error)}
    sys.stdout.write(f"\n{json.dumps({**ending, 'at': time.time()})}\n")
    sys.stdout.flush()


def drive(framework: str, address: str, folder: str, ranks: str, steps: str) -> None:
    """Run the two jobs."""
    second = Path(folder) / "second"
    second.mkdir()
    with session(framework, address) as run:
        report("first", lambda: run(work, int(ranks), folder, int(steps)))
        report("second", lambda: run(work, int(ranks), str(second), SHORT))


def left(framework: str, address: str) -> None:
    """Print what the cluster keeps of the jobs that have ended."""
    if framework == "dask":
        from distributed import Client  # noqa: PLC0415 -- only one of the frameworks is there

        with Client(address) as client:
            told = {
                "tasks": client.run_on_scheduler(lambda dask_scheduler: sorted(map(str, dask_scheduler.tasks))),
                "jobs": sorted({name for each in client.run(_known_jobs).values() for name in each}),
                "threads": sum(client.nthreads().values()),
            }
    else:
        import ray  # noqa: PLC0415 -- as above
        from ray.util import placement_group_table  # noqa: PLC0415 -- as above

        ray.init(address=address, log_to_driver=False)
        groups = [each for each in placement_group_table().values() if each["state"] != "REMOVED"]
        free, whole = ray.available_resources().get("CPU", 0), ray.cluster_resources().get("CPU", 0)
        told = {"groups": [each["state"] for each in groups], "taken": whole - free, "threads": whole}
    sys.stdout.write(f"\n{json.dumps(told)}\n")


def _known_jobs() -> list[str]:
    from multiring.dask import worker  # noqa: PLC0415 -- runs in a Dask worker

    return [*worker._jobs, *worker._reserved]  # noqa: SLF001 -- nothing public tells what a worker keeps


if __name__ == "__main__":
    # Functions must have the module's name by which the ranks import them.
    from benchmarks.evidence.launching import cluster_driver

    (cluster_driver.left if len(sys.argv) == 3 else cluster_driver.drive)(*sys.argv[1:])
