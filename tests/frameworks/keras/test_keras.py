"""Keras on TensorFlow, torch and JAX: equal loss curves, and Horovod's callbacks."""

import importlib
import os
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.ranks import Here, Process, run_ranks

BACKENDS = ("tensorflow", "torch", "jax")
# Keras imports this on any backend when it saves a model; the nursery imports it once for all ranks.
SAVES_BY = ("tensorflow",) if find_spec("tensorflow") else ()
NAMES = ("distributed", "accumulating", "normalizing", "by_callbacks")
# Keras gives torch and JAX float32 arrays, whatever floatx is.
TOLERANCE = {"tensorflow": 1e-10, "torch": 1e-5, "jax": 1e-5}
# This module does not import Keras, because then all tests would use one backend.
pytestmark = [
    pytest.mark.skipif(find_spec("keras") is None, reason="Keras is not installed"),
]


def found_here(_here: Here, folder: str, *names: str) -> dict[str, Any]:
    programs = importlib.import_module("tests.support.keras_programs")
    assert programs.keras.backend.backend() == os.environ["KERAS_BACKEND"]
    found: dict[str, Any] = programs.found(folder, names)
    return found


def found_by(backend: str, ranks: int, folder: Path, *names: str) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("KERAS_BACKEND", backend)
        patched.setenv("TF_CPP_MIN_LOG_LEVEL", "3")
        process = Process(nursery="keras", beforehand=(*SAVES_BY, "tests.support.keras_programs"))
        by_rank = run_ranks(found_here, ranks, str(folder), *names, process=process, deadline_s=240.0)
    assert all(each == by_rank[0] for each in by_rank), by_rank
    first: dict[str, Any] = by_rank[0]
    return first


@cache
def found_alone(backend: str) -> dict[str, Any]:
    return found_by(backend, 1, Path(), *NAMES[:3])


@pytest.mark.parametrize(("backend", "ranks"), [("tensorflow", 2), ("tensorflow", 3), ("torch", 2), ("jax", 2)])
def test_results_are_those_of_one_process(backend: str, ranks: int, tmp_path: Path) -> None:
    if find_spec(backend) is None:
        pytest.skip(f"{backend} is not installed")
    names = NAMES if ranks == 2 else NAMES[:1]
    alone = found_alone(backend)
    found = found_by(backend, ranks, tmp_path, *names)
    assert found["distributed"][0] < 0.5  # the training started above 1
    for name in set(names) & set(alone):
        assert np.abs(np.array(found[name]) - alone[name]).max() < TOLERANCE[backend], name
    if "by_callbacks" in names:
        assert found["by_callbacks"][-1] < found["by_callbacks"][0]


def test_a_data_set_of_tensorflow_has_the_plans_rows_and_traces_few_functions(tmp_path: Path) -> None:
    assert found_by("tensorflow", 1, tmp_path, "dealt")["dealt"] == {False: 1, True: 3}


def test_mistakes_say_what_is_wanted(tmp_path: Path) -> None:
    found = found_by("tensorflow", 2, tmp_path, "mistaken")["mistaken"]
    wanted = {
        "twice": "this SGD is already distributed",
        "none": "a builtins.int",
        "legacy": "want one of keras.optimizers",
        "synchronized": "this layer knows the ranks of the job",
        "globals": "BroadcastGlobalVariablesCallback",
        "model": "want a keras.Model",
        "again": "distribute was already called for this model",
        "jit": "want jit_compile=False",
        "rows": "Data cardinality is ambiguous",
        "maximum": "want Average or Sum",
        "rate": "initial_lr=None: want a number of 0 or more",
        **dict.fromkeys(("data", "ragged", "sparse"), "the data of rank 1 differ from rank 0's"),
    }
    assert found.keys() == wanted.keys()
    for name, words in wanted.items():
        assert words in found[name], (name, found[name])
