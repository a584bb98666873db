"""Compare TensorFlow's eager allreduce with multiring and with Horovod 0.28.1.

    python benchmarks/promises/tensorflow_horovod.py

Both run on 2 ranks. Horovod runs in its own environment (`multiring bench --install horovod`, with TensorFlow 2.12),
once with each of CYCLES, and its best time counts. The runs of both libraries alternate. Every run first checks the
result of each size. The figure for a size is the median of the rounds' ratios.
"""

import argparse
import importlib
import json
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

CASES = ((64, 300), (1 << 20, 60), (8 << 20, 12), (64 << 20, 3))  # the sizes in bytes, and the calls per sample
SAMPLES = 9
FLOORS = {64: 5.0, 1 << 20: 5.0, 8 << 20: 5.0, 64 << 20: 3.0}
CYCLES = ("0.1", "1")  # values for HOROVOD_CYCLE_TIME: the milliseconds between Horovod's polls; the default is 1


def worker(module: str) -> None:
    """Check and time each size; rank 0 prints the seconds of a call."""
    import numpy as np  # noqa: PLC0415 -- of two environments, in the process that times
    import tensorflow as tf  # noqa: PLC0415 -- as above

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    hvd: Any = importlib.import_module(module)
    hvd.init()
    found: dict[int, float] = {}
    for size, calls in CASES:
        tensor = tf.fill([size // 4], float(hvd.rank() + 1))
        wanted = (hvd.size() + 1) / 2
        result = hvd.allreduce(tensor, name=f"sized{size}").numpy()
        if result.shape != (size // 4,) or not np.array_equal(result, np.full(size // 4, wanted, np.float32)):
            raise SystemExit(f"{module}, {size} B: want {wanted} everywhere, got {result}")
        seconds = []
        for number in range(SAMPLES + 1):
            hvd.allreduce(tf.zeros(1), name="together")
            start = time.perf_counter()
            for _ in range(calls):
                hvd.allreduce(tensor, name=f"sized{size}")
            if number:  # the first sample allocates and plans
                seconds.append((time.perf_counter() - start) / calls)
        found[size] = statistics.median(seconds)
    if hvd.rank() == 0:
        print("FOUND " + json.dumps([tf.__version__, found]), flush=True)
    hvd.shutdown()


def run(command: list[str], **variables: str) -> tuple[str, dict[int, float]]:
    """Return TensorFlow's version and a job's seconds for each size."""
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", **variables}  # noqa: TID251 -- for children
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)  # noqa: S603 -- ours
    found = re.search(r"FOUND (\[.*\])", done.stdout)
    if done.returncode or found is None:
        raise SystemExit(done.stdout + done.stderr)
    version, seconds = json.loads(found[1])
    return version, {int(size): value for size, value in seconds.items()}


def ours() -> tuple[str, dict[int, float]]:
    """Time multiring in this environment."""
    python = sys.executable
    words = ("-m", "multiring", "run", "-n", "2", "--", python, __file__, "--worker", "multiring.tensorflow")
    return run([python, *words])


def horovods(python: Path, cycle: str) -> tuple[str, dict[int, float]]:
    """Time Horovod in its own environment."""
    start = [str(python.parent / "horovodrun"), "--gloo", "-np", "2", "-H", "localhost:2", str(python)]
    path = f"{python.parent}:{os.environ.get('PATH', '')}"  # noqa: TID251 -- for children
    words = [str(Path(__file__).resolve()), "--worker", "horovod.tensorflow"]
    return run([*start, *words], HOROVOD_CYCLE_TIME=cycle, PATH=path)


def main() -> None:
    """Measure the ratios; exit with 1 if a floor is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--worker")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if options.worker:
        worker(options.worker)
        return
    from multiring._bench.install import installed  # noqa: PLC0415 -- not in Horovod's environment

    python = installed("horovod") / "bin" / "python"
    rounds: list[tuple[dict[int, float], dict[int, float]]] = []
    cycles: dict[str, list[dict[int, float]]] = {cycle: [] for cycle in CYCLES}
    versions = ("", "")
    for _ in range(options.rounds):
        own_version, own = ours()
        for cycle in CYCLES:
            its_version, seconds = horovods(python, cycle)
            cycles[cycle].append(seconds)
        rounds.append((own, {size: min(each[-1][size] for each in cycles.values()) for size, _ in CASES}))
        versions = (own_version, its_version)
    print(f"multiring on TensorFlow {versions[0]}, Horovod 0.28.1 (Gloo) on TensorFlow {versions[1]}, 2 ranks, float32")
    missed = False
    for size, _ in CASES:
        ratio = statistics.median(its[size] / own[size] for own, its in rounds)
        missed = missed or ratio < FLOORS[size]
        own_ms = statistics.median(own[size] for own, _ in rounds) * 1e3
        by_cycle = ", ".join(
            f"{statistics.median(each[size] for each in found) * 1e3:.3f} ms (cycle {cycle})"
            for cycle, found in cycles.items()
        )
        print(f"{size} B: {own_ms:.3f} ms; Horovod {by_cycle}: {ratio:.2f} times as fast; floor {FLOORS[size]}")
    raise SystemExit(int(missed))


if __name__ == "__main__":
    main()
