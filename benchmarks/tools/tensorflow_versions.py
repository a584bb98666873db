"""Check which versions of TensorFlow multiring works with.

    python benchmarks/tools/tensorflow_versions.py [--versions 2.17.1]

For each version, the program creates an environment below build/ with only TensorFlow and its dependencies. Two ranks
there try the operations and Keras from this checkout. A version takes a minute and 1.5 GB. The program prints a line
for each version. The exit code is 1 if a promised version does not work. The promised versions are the oldest in
_frontend/requirements.py and all newer ones.
"""

import argparse
import os
import re
import subprocess
import sys
import venv
from pathlib import Path

from multiring._frontend.requirements import OLDEST

ROOT = Path(__file__).parents[2]
VERSIONS = ("2.16.2", "2.17.1", "2.18.1", "2.19.1", "2.20.0", "2.21.0")
PATIENCE_S = 300.0
CHECK = """
from multiring._frontend import requirements

requirements.OLDEST |= {"tensorflow": "0", "keras": "0"}  # otherwise multiring refuses versions that are too old
import keras
import numpy as np
import tensorflow as tf

import multiring.keras as mk
import multiring.tensorflow as mt

mt.init()
rank = mt.rank()
for wrapped in (lambda function: function, tf.function):
    for dtype in (tf.float32, tf.bfloat16, tf.int64, tf.complex64):
        found = wrapped(lambda value: mt.allreduce(value, op=mt.Sum))(tf.cast(tf.fill([5], rank + 1), dtype))
        assert (tf.cast(found, tf.complex64).numpy() == 3).all(), found
    assert wrapped(mt.allgather)(tf.fill([rank + 1, 2], rank)).shape[0] == 3
    received, splits = wrapped(mt.alltoall)(tf.range(3) + rank, tf.constant([1, 2]))
    assert splits.numpy().tolist() == [rank + 1] * 2
    assert wrapped(lambda value: mt.reducescatter(value, op=mt.Sum))(tf.ones([4])).numpy().tolist() == [2, 2]
value = tf.Variable([2.0])
with tf.GradientTape() as tape:
    loss = tf.reduce_sum(mt.allreduce(value * (rank + 1.0)))
assert mt.DistributedGradientTape(tape).gradient(loss, [value])[0].numpy().tolist() == [1.5]
try:
    mt.allreduce(tf.ones(2 + rank), name="shapes")
except tf.errors.FailedPreconditionError as error:
    assert "rank 1: (3,)" in str(error), error
else:
    raise AssertionError("shapes that differ")
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1), mt.SyncBatchNormalization()])
model = mk.distribute(model)
model.compile(keras.optimizers.SGD(0.01), "mse")
data = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
history = model.fit(data, data[:, :1], epochs=3, verbose=0).history["loss"]
assert mt.allgather_object(history) == [history] * 2 and history[-1] < history[0], history
print(f"WORKS Keras {keras.__version__}, NumPy {np.__version__}", flush=True)
"""


def tried(version: str) -> str:
    """Try a version; return "works ..." or the reason for the failure."""
    folder = ROOT / "build" / f"tensorflow-{version}"
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
    wanted = [f"tensorflow-cpu=={version}", "ml_dtypes", "numpy>=1.23"]
    done = subprocess.run(  # noqa: S603 -- ours
        [str(python), "-m", "pip", "install", "--quiet", *wanted],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        return f"cannot be installed: {done.stderr.strip().splitlines()[-1]}"
    check = folder / "check.py"
    check.write_text(CHECK, encoding="utf-8")
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "KERAS_BACKEND": "tensorflow", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(  # noqa: S603 -- ours
        [str(python), "-m", "multiring", "run", "-n", "2", "--", str(python), str(check)],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
        env={**os.environ, **quiet},  # noqa: TID251 -- for children
    )
    found = re.search(r"WORKS (.*)", done.stdout)
    if done.returncode or found is None:
        return f"does not work:\n{(done.stdout + done.stderr)[-1500:]}"
    return f"works, {found[1]}"


def main() -> None:
    """Try each version; exit with 1 if a promised version does not work."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--versions", default=",".join(VERSIONS))
    missed = False
    for version in parser.parse_args().versions.split(","):
        found = tried(version)
        is_promised = [*map(int, version.split("."))] >= [*map(int, OLDEST["tensorflow"].split("."))]
        missed = missed or (is_promised and not found.startswith("works"))
        print(f"TensorFlow {version}, Python {sys.version_info[0]}.{sys.version_info[1]}: {found}", flush=True)
    raise SystemExit(int(missed))


if __name__ == "__main__":
    main()
