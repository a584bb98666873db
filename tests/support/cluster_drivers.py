"""The driver program of the clusters' tests: `python -m tests.support.cluster_drivers dask|ray|spark ADDRESS`.

It runs several jobs in one session of the cluster, and prints one line of JSON for each.
"""

import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.support import cluster_programs as programs

MARK = "CASE "  # the cluster's own messages are on the same output


def report(case: str, job: Callable[[], Any]) -> None:
    """Run a job and print how it ended, after how many seconds."""
    begin = time.monotonic()
    ending: dict[str, Any] = {"case": case}
    try:
        ending["result"] = job()
    except Exception as error:  # noqa: BLE001 -- the tests look at every error
        cause = error.__cause__
        ending |= {"error": type(error).__name__, "text": str(error), "cause": cause and type(cause).__name__}
    ending["seconds"] = round(time.monotonic() - begin, 2)
    sys.stdout.write(f"{MARK}{json.dumps(ending)}\n")
    sys.stdout.flush()


def ray_jobs(address: str) -> None:
    import ray  # noqa: PLC0415 -- only one of the frameworks is there

    import multiring.ray  # noqa: PLC0415 -- as above

    report("not initialized", lambda: multiring.ray.run(programs.tell_numbers, 1))
    ray.init(address=address)

    def left() -> dict[str, Any]:
        from ray.util import placement_group_table  # noqa: PLC0415 -- as above

        groups = [each["state"] for each in placement_group_table().values() if each["state"] != "REMOVED"]
        until = time.monotonic() + 240
        while ray.available_resources().get("CPU") != ray.cluster_resources()["CPU"] and time.monotonic() < until:
            time.sleep(0.2)
        return {"groups": groups, "cpus": ray.available_resources().get("CPU")}

    report("digits", lambda: multiring.ray.run(programs.learn_digits, 4, (60,), placement="SPREAD"))
    report("left", left)
    report("raise in a collective", lambda: multiring.ray.run(programs.raise_while_others_reduce, 4, (1,)))
    report("children", lambda: multiring.ray.run(programs.leave_children, 4, (1,)))
    report("killed", lambda: multiring.ray.run(programs.be_killed, 4, (3,)))
    report("again", lambda: multiring.ray.run(programs.tell_numbers, 4))
    report("one host", lambda: multiring.ray.run(programs.tell_numbers, 2, placement="STRICT_PACK"))
    report("secret", lambda: multiring.ray.run(programs.find_secret, 4, (["/dev/shm", "/tmp"],)))  # noqa: S108 -- searched
    report("executor", _executor)
    report("too few", lambda: multiring.ray.run(programs.tell_numbers, 5, start_timeout_s=3))
    report("no GPU", lambda: multiring.ray.run(programs.tell_numbers, 1, resources={"GPU": 1}, start_timeout_s=2))
    report("pickle", lambda: multiring.ray.run(programs.tell_numbers, 1, (sys.stdin,)))
    report("placement", lambda: multiring.ray.run(programs.tell_numbers, 1, placement="CLOSE"))
    report("left", left)


def dask_jobs(address: str) -> None:
    from distributed import Client  # noqa: PLC0415 -- only one of the frameworks is there

    import multiring.dask  # noqa: PLC0415 -- as above

    def run(function: Callable[..., Any], workers: int, *args: Any, **options: Any) -> Any:
        return multiring.dask.run(client, function, workers, args, **options)

    report("no client", lambda: multiring.dask.run(None, programs.tell_numbers, 1))
    with Client(address) as client:
        client.wait_for_workers(2)
        report("digits", lambda: run(programs.learn_digits, 4, 60))
        report("raise", lambda: run(programs.raise_on, 4, 2))
        report("raise in a collective", lambda: run(programs.raise_while_others_reduce, 4, 1))
        report("children", lambda: run(programs.leave_children, 4, 1))
        report("killed", lambda: run(programs.be_killed, 4, 3))
        report("again", lambda: run(programs.tell_numbers, 4))
        report("secret", lambda: run(programs.find_secret, 4, ["/dev/shm", "/tmp"]))  # noqa: S108 -- searched
        report("too few", lambda: run(programs.tell_numbers, 5, start_timeout_s=3))
        with _occupied() as path:
            busy = client.map(programs.wait_while_there, [path] * 2, pure=False)
            _wait_until_occupied(path, 2)
            report("busy", lambda: run(programs.tell_numbers, 4, start_timeout_s=4))
        client.gather(busy)
        report("pickle", lambda: run(programs.tell_numbers, 1, sys.stdin))
        report("worker killed", lambda: run(programs.kill_parent_worker, 4, 3))
        client.wait_for_workers(2, timeout=240)
        report("again", lambda: run(programs.tell_numbers, 4))
        report("left", lambda: [len(client.processing()[worker]) for worker in client.processing()])


def spark_jobs(address: str) -> None:
    from pyspark.sql import SparkSession  # noqa: PLC0415 -- only one of the frameworks is there

    import multiring.spark  # noqa: PLC0415 -- as above

    def run(function: Callable[..., Any], num_proc: int | None, *args: Any, **options: Any) -> Any:
        return multiring.spark.run(function, num_proc, args, **options)

    report("no application", lambda: run(programs.tell_numbers, 1))
    session = SparkSession.builder.master(address).config("spark.ui.enabled", "false").getOrCreate()
    report("digits", lambda: run(programs.learn_digits, 4, 60, start_timeout_s=60))
    report("raise", lambda: run(programs.raise_on, 4, 2))
    report("raise in a collective", lambda: run(programs.raise_while_others_reduce, 4, 1))
    report("children", lambda: run(programs.leave_children, 4, 1))
    report("killed", lambda: run(programs.be_killed, 4, 3))
    report("again", lambda: run(programs.tell_numbers, None))
    report("secret", lambda: run(programs.find_secret, 4, ["/dev/shm", "/tmp"]))  # noqa: S108 -- searched
    report("too few", lambda: run(programs.tell_numbers, 5, start_timeout_s=3))
    with ThreadPoolExecutor() as pool:
        context = session.sparkContext
        with _occupied() as path:
            busy = pool.submit(lambda: context.parallelize([path] * 2, 2).map(programs.wait_while_there).collect())
            _wait_until_occupied(path, 2)
            report("busy", lambda: run(programs.tell_numbers, 4, start_timeout_s=4))
        busy.result()
    report("pickle", lambda: run(programs.tell_numbers, 1, sys.stdin))
    report("worker killed", lambda: run(programs.kill_parent_worker, 4, 3))
    report("again", lambda: run(programs.tell_numbers, 4, start_timeout_s=60))
    report("horovod", _horovod_on_spark)
    session.stop()


def estimator_jobs(address: str) -> None:
    """Run the estimators of Spark, in a session of their own."""
    from pyspark.sql import SparkSession  # noqa: PLC0415 -- only one of the frameworks is there
    from tests.support.estimator_cases import estimator_cases  # noqa: PLC0415 -- as above

    import multiring.spark  # noqa: PLC0415 -- as above

    session = SparkSession.builder.master(address).config("spark.ui.enabled", "false").getOrCreate()
    for case, job in estimator_cases(session).items():
        report(case, job)
    report("again", lambda: multiring.spark.run(programs.tell_numbers, 2))
    session.stop()


@contextlib.contextmanager
def _occupied() -> Iterator[str]:
    """Give the path of a file that is there during the block, for `wait_while_there`."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "busy"
        path.touch()
        yield str(path)
        path.unlink()


def _wait_until_occupied(path: str, tasks: int) -> None:
    until = time.monotonic() + 240
    while len(list(Path(path).parent.iterdir())) <= tasks:
        assert time.monotonic() < until
        time.sleep(0.05)


def _horovod_on_spark() -> list[Any]:
    from multiring.horovod.spark_running import run  # noqa: PLC0415 -- only one of the frameworks is there

    return run(programs.horovod_sum, (2.0,), num_proc=2, env={"SPICE": "pepper"}, verbose=0)


def _executor() -> dict[str, Any]:
    """Use Horovod's RayExecutor, as a program under `multiring run --horovod` would."""
    import ray  # noqa: PLC0415 -- only one of the frameworks is there

    from multiring.horovod.ray_executor import RayExecutor  # noqa: PLC0415 -- as above

    executor = RayExecutor(RayExecutor.create_settings(timeout_s=60), num_workers=2)
    executor.start(executable_cls=programs.Counter, executable_args=[10], extra_env_vars={"SPICE": "pepper"})
    found: dict[str, Any] = {
        "run": executor.run(programs.horovod_sum, args=[2.0]),
        "run again": executor.run(programs.horovod_sum, kwargs={"base": 3.0}),
        "remote": ray.get(executor.run_remote(programs.horovod_sum, args=[4.0])),
        "execute": executor.execute(lambda counter: counter.count()),
        "single": executor.execute_single(lambda counter: counter.count()),
    }
    try:
        executor.run(programs.raise_on, args=[1])
    except Exception as error:  # noqa: BLE001 -- the tests look at every error
        found["raised"] = [type(error).__name__, type(error.__cause__).__name__]
    executor.shutdown()
    by_host = RayExecutor(RayExecutor.create_settings(), num_hosts=2, num_workers_per_host=2)
    by_host.start()
    found["by host"] = by_host.run(programs.tell_numbers)
    by_host.shutdown()
    return found


if __name__ == "__main__":
    {"dask": dask_jobs, "estimators": estimator_jobs, "ray": ray_jobs, "spark": spark_jobs}[sys.argv[1]](*sys.argv[2:])
