"""Tests depend on nothing of the user's: what a shell, an allocation or a home says must not decide about them.

Without this, tests fail where the user has chosen an engine for multiring, set the width of a terminal, works in an
allocation of Slurm or behind a proxy, or has another type of numbers in Keras's settings.
"""

import json
from collections.abc import Iterable, MutableMapping
from pathlib import Path

from multiring._foreign_variables import FOREIGN_VARIABLES

# The variables by which a run of the tests is chosen.
_OF_TESTS = ("MULTIRING_TEST_", "MULTIRING_BENCH_PEERS")
# Of multiring, of launchers, and of frameworks.
_BEGINS = (
    *("DASK_", "HOROVOD_", "JAX_ENABLE_", "KERAS_", "LSB_", "MULTIRING_", "OMPI_", "PBS_", "PET_", "PMI_"),
    *("PMIX_", "PRTE_", "RAY_", "SLURM_", "SPARK_", "TORCHELASTIC_", "TUNE_"),
)
# Of the shell, of libraries that compute, of git, whose hooks may run the tests, and of Python. PYTHONOPTIMIZE would
# switch the asserts off in what tests start.
_NAMES = {
    *(
        "COLUMNS",
        "FORCE_COLOR",
        "GIT_DIR",
        "GIT_INDEX_FILE",
        "GIT_WORK_TREE",
        "LINES",
        "MKL_NUM_THREADS",
        "NO_COLOR",
        "OMP_NUM_THREADS",
        "OPENBLAS_NUM_THREADS",
    ),
    *("PYTHONOPTIMIZE", "PYTHONWARNINGS", "PYTHON_COLORS"),
}
_HERE = "127.0.0.1,localhost,::1"
_KERAS = {"floatx": "float32", "epsilon": 1e-07, "backend": "tensorflow", "image_data_format": "channels_last"}


def of_the_user(names: Iterable[str]) -> list[str]:
    """Return those of the names of variables that tests must not have from the user."""
    return [
        name
        for name in names
        if not name.startswith(_OF_TESTS) and (name.startswith(_BEGINS) or name in _NAMES or name in FOREIGN_VARIABLES)
    ]


def forget_user(environment: MutableMapping[str, str], folder: Path) -> None:
    """Remove what is the user's from an environment; `folder`, which stays, takes the place of his settings.

    Keras reads a file in the user's home, and writes it with the backend of whichever test came first.
    """
    for name in of_the_user(list(environment)):
        del environment[name]
    for name in ("no_proxy", "NO_PROXY"):
        known = environment.get(name)
        environment[name] = f"{known},{_HERE}" if known else _HERE
    (folder / "keras.json").write_text(json.dumps(_KERAS), encoding="utf-8")
    environment["KERAS_HOME"] = str(folder)
