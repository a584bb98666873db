"""Calls of trees, groups and states whose structures differ on one rank: a MismatchError on every rank, at once."""

from importlib.util import find_spec
from typing import Any

import pytest
from tests.support import structure_cases
from tests.support.conforming.homes import FRAMEWORKS
from tests.support.ranks import Process, run_ranks

PATIENT_S = 240.0  # compilation is slow on few cores
CALLS = {"numpy": 40, "torch": 40, "tensorflow": 8, "jax": 5}  # random calls


def options_of(framework: str, patched: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the options of ranks that use a framework."""
    if framework in {"chainer", "caffe"}:
        return {"home": FRAMEWORKS["caffe-standin" if framework == "caffe" else framework].home}
    package = {"numpy": "numpy"}.get(framework, framework)
    if find_spec(package) is None or (framework == "keras" and find_spec("jax") is None):
        pytest.skip(f"{package} is not installed")
    patched.setenv("TF_CPP_MIN_LOG_LEVEL", "3")
    patched.setenv("KERAS_BACKEND", "jax")
    nursery = {"numpy": "", "torch": "torch", "jax": "jax"}.get(framework, "keras")
    beforehand = () if framework == "numpy" else (framework, f"multiring.{framework}")
    return {"process": Process(nursery=nursery, beforehand=beforehand)}


@pytest.mark.parametrize("framework", structure_cases.CASES)
def test_a_rank_that_differs_is_named_on_all_ranks(framework: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = options_of(framework, monkeypatch)
    results = run_ranks(
        structure_cases.everything, 2, framework, CALLS.get(framework, 0), deadline_s=PATIENT_S, **options
    )
    by_rank = [told for told, _ in results]
    for name, (word, _) in by_rank[0].items():
        told = [found[name][1] for found in by_rank]
        if word == structure_cases.RIGHT:
            assert told == ["no error"] * 2, (name, told)
        else:
            for each in told:
                assert each.startswith("MismatchError: "), (name, told)
                assert word in each, (name, told)
    for _, wrong in results:
        assert not wrong, "\n".join(wrong)
