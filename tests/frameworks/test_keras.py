"""Keras on TensorFlow, torch and JAX: one script, one loss curve on any number of ranks, and Horovod's callbacks."""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

PROGRAMS = Path(__file__).with_name("keras_programs.py")
BACKENDS = ("tensorflow", "torch", "jax")
NAMES = ("distributed", "accumulating", "by_callbacks")
# Keras gives torch and JAX arrays of float32, whatever floatx is.
TOLERANCE = {"tensorflow": 1e-10, "torch": 1e-5, "jax": 1e-5}
pytest.importorskip("keras")


@cache
def found_by(backend: str, ranks: int, folder: Path, *names: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "multiring", "run", "-n", str(ranks), "--", sys.executable, str(PROGRAMS)]
    environment = {**os.environ, "KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(
        [*command, str(folder), *names], capture_output=True, text=True, timeout=200, check=False, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    line = next(line for line in done.stdout.splitlines() if "found " in line)
    found: dict[str, Any] = json.loads(line.partition("found ")[2])
    return found


@pytest.mark.parametrize(("backend", "ranks"), [("tensorflow", 2), ("tensorflow", 3), ("torch", 2), ("jax", 2)])
def test_results_are_those_of_one_process(backend: str, ranks: int, tmp_path: Path) -> None:
    pytest.importorskip(backend)
    names = NAMES if ranks == 2 else NAMES[:1]
    alone = found_by(backend, 1, tmp_path, *NAMES[:2])
    found = found_by(backend, ranks, tmp_path, *names)
    assert found["distributed"][0] < 0.5  # it began beyond 1
    for name in set(names) & set(alone):
        assert np.abs(np.array(found[name]) - alone[name]).max() < TOLERANCE[backend], name
    if "by_callbacks" in names:
        assert found["by_callbacks"][-1] < found["by_callbacks"][0]


def test_mistakes_say_what_is_wanted(tmp_path: Path) -> None:
    found = found_by("tensorflow", 2, tmp_path, "mistaken")["mistaken"]
    wanted = {
        "twice": "this SGD is distributed already",
        "none": "a builtins.int",
        "legacy": "want one of keras.optimizers",
        "globals": "BroadcastGlobalVariablesCallback",
        "model": "want a keras.Model",
        "again": "one call of distribute",
        "jit": "want jit_compile=False",
        "rows": "[3, 50] rows",
    }
    assert found.keys() == wanted.keys()
    for name, words in wanted.items():
        assert words in found[name], (name, found[name])
