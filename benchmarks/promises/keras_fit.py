"""Compare the steps of Keras' `fit` on 2 ranks with two unconnected processes.

    python benchmarks/promises/keras_fit.py

Each backend trains a small convolutional network. Each process has one core and one thread. Runs of both kinds
alternate. The figure is the median of the rounds' ratios. It is 1 if sharing the gradients costs nothing.
"""

import argparse
import os
import re
import statistics
import subprocess
import sys
import time
from typing import Any

FLOOR = 0.90
STEPS, LEFT_OUT = 60, 10


def worker(kind: str) -> None:
    """Train, and print the median seconds of a step."""
    import keras  # noqa: PLC0415 -- of one backend, in the process that times it
    import numpy as np  # noqa: PLC0415 -- as above

    import multiring.keras as mk  # noqa: PLC0415 -- as above

    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf  # noqa: PLC0415 -- as above

        tf.config.threading.set_intra_op_parallelism_threads(1)
        # Multiring's `init` sets the same number of threads. A second thread would take the core from the thread that
        # serves the collective.
        tf.config.threading.set_inter_op_parallelism_threads(1)
    elif keras.backend.backend() == "torch":
        import torch  # noqa: PLC0415 -- as above

        torch.set_num_threads(1)
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((32, 32, 3)),
            *(layers.Conv2D(32, 3, activation="relu"), layers.MaxPooling2D(), layers.Conv2D(64, 3, activation="relu")),
            *(layers.MaxPooling2D(), layers.Conv2D(64, 3, activation="relu"), layers.Flatten()),
            *(layers.Dense(64, activation="relu"), layers.Dense(10)),
        ]
    )
    optimizer: Any = keras.optimizers.SGD(0.01, momentum=0.9)
    callbacks: list[Any] = []
    if kind == "shared":
        mk.init()
        optimizer = mk.DistributedOptimizer(optimizer)
        callbacks = [mk.callbacks.BroadcastGlobalVariablesCallback(0)]
    ends: list[float] = []

    def note(batch: int, logs: Any) -> None:
        del batch, logs
        ends.append(time.perf_counter())

    random = np.random.default_rng(0)
    images = random.normal(size=(STEPS * 64, 32, 32, 3)).astype(np.float32)
    labels = random.integers(0, 10, len(images))
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    callbacks.append(keras.callbacks.LambdaCallback(on_train_batch_end=note))
    model.fit(images, labels, batch_size=64, verbose=0, callbacks=callbacks)
    times = [after - before for before, after in zip(ends[LEFT_OUT:], ends[LEFT_OUT + 1 :], strict=False)]
    print(f"step {statistics.median(times)}")


def step_s(backend: str, kind: str) -> float:
    """Return the seconds per step of two processes, sharing gradients or not."""
    command = [sys.executable, "-m", "multiring", "run", "-n", "2", "--", sys.executable, __file__, "--worker", kind]
    environment = {**os.environ, "KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"}  # noqa: TID251 -- for children
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)  # noqa: S603 -- ours
    found = [float(each) for each in re.findall(r"step ([\d.e-]+)", done.stdout)]
    if len(found) != 2:
        raise SystemExit(done.stdout + done.stderr)
    return max(found)


def main() -> None:
    """Measure the ratios; exit with 1 if a floor is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--worker", choices=("shared", "alone"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--backends", default="tensorflow,torch,jax")
    options = parser.parse_args()
    if options.worker:
        worker(options.worker)
        return
    missed = False
    for backend in options.backends.split(","):
        pairs = [(step_s(backend, "alone"), step_s(backend, "shared")) for _ in range(options.rounds)]
        ratio = statistics.median(alone / shared for alone, shared in pairs)
        missed = missed or ratio < FLOOR
        shown = ", ".join(f"{1e3 * alone:.1f}/{1e3 * shared:.1f}" for alone, shared in pairs)
        print(f"{backend}: {ratio:.3f} of two unconnected processes' steps (ms: {shown}); floor {FLOOR}")
    raise SystemExit(int(missed))


if __name__ == "__main__":
    main()
