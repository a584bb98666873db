"""First steps in TensorFlow, JAX and Keras: different models, and equal samples.

Ranks with different models raise an error. Ranks with equal samples cause a warning.
"""

import importlib
from importlib.util import find_spec
from typing import Any

import pytest
from tests.support.ranks import Here, Process, run_ranks

pytestmark = [
    pytest.mark.skipif(find_spec("keras") is None, reason="Keras is not installed"),
]


def call(here: Here, name: str) -> Any:
    return getattr(importlib.import_module("tests.support.first_steps_programs"), name)(here.rank)


def run_with(backend: str, name: str, ranks: int) -> list[Any]:
    if find_spec(backend) is None:
        pytest.skip(f"{backend} is not installed")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("KERAS_BACKEND", backend)
        patched.setenv("TF_CPP_MIN_LOG_LEVEL", "3")
        process = Process(nursery="keras", beforehand=("tests.support.first_steps_programs",))
        return run_ranks(call, ranks, name, process=process, deadline_s=240.0)


@pytest.mark.parametrize("backend", ["tensorflow", "torch", "jax"])
def test_ranks_are_told_of_other_models_and_of_equal_samples(backend: str) -> None:
    by_rank = run_with(backend, "found", 2)
    warned = []
    for rank, told in enumerate(by_rank):
        for name, lines in told.items():
            if name.endswith(": other models"):
                assert len(lines) == 1, (rank, name, lines)
                assert "MismatchError" in lines[0] or "MismatchInternalError" in lines[0], (rank, name, lines)
                assert "before the second step the ranks have different values of parameter" in lines[0]
                assert "MULTIRING_CHECK_FIRST_STEPS=0" in lines[0]
            elif name.endswith(": same samples"):
                warned += [(rank, line) for line in lines]
            else:
                assert not lines, (rank, name, lines)
    assert len(warned) == 1, warned  # only once in the job, on rank 0
    assert warned[0][0] == 0
    assert "all 2 ranks have the same gradients" in warned[0][1]


def test_a_rank_that_has_joined_holds_nobody_up() -> None:
    assert run_with("torch", "join_early", 3) == [True] * 3
