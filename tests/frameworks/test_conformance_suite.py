"""The conformance suite detects faults of an adapter.

The toy adapter gets one fault at a time; exactly the checks of this fault must fail.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.support.conforming import on_toy
from tests.support.nursery import Here
from tests.support.ranks import run_ranks

from multiring._frontend import lifecycle
from multiring.adapters import conformance
from multiring.adapters.conformance import CHECKS, Adapter, Outcome
from multiring.errors import ArgumentError

GOOD = on_toy.ADAPTER


def in_place(array: Any, op: str, **keywords: Any) -> Any:
    found = GOOD.all_reduce(array, op, **keywords)
    array.flags.writeable = True
    array[...] = found
    return found


def widened(array: Any, op: str, **keywords: Any) -> Any:
    return np.asarray(GOOD.all_reduce(array, op, **keywords)).astype(np.complex128)


def flat(array: Any, op: str, **keywords: Any) -> Any:
    return np.atleast_1d(GOOD.all_reduce(array, op, **keywords))


def by_memory(array: Any) -> Any:
    """Convert an array wrongly: read its elements in memory order."""
    base = array if array.base is None or array.base.size < array.size else array.base.reshape(-1)
    return GOOD.make(base.reshape(-1)[: array.size].reshape(array.shape))


def silent(array: Any, op: str, **keywords: Any) -> Any:
    try:
        return GOOD.all_reduce(array, op, **keywords)
    except Exception:  # noqa: BLE001 -- the fault: it hides errors
        return array


class Selfish(on_toy.Trainer):
    def step(self, slopes: Any) -> None:
        held = self._held()
        held.update({name: held[name] - 0.25 * slope for name, slope in slopes.items()})


class Forgetful(on_toy.Trainer):
    def state(self, **values: Any) -> Any:
        state = super().state(**values)
        state.restore = lambda: None
        return state


FAULTS: dict[str, tuple[Adapter, set[str]]] = {
    "in place": (replace(GOOD, all_reduce=in_place), {"inputs intact"}),
    "another type": (replace(GOOD, all_reduce=widened), {"type float32", "type int8", "shapes", "zero size", "order"}),
    "flat": (replace(GOOD, all_reduce=flat), {"shapes"}),
    "memory for elements": (replace(GOOD, make=by_memory), {"non-contiguous"}),
    "errors swallowed": (replace(GOOD, all_reduce=silent), {"shapes differ", "types differ", "wrong operation"}),
    "selfish": (replace(GOOD, trainer=Selfish), {"gradients", "replicas", "two models"}),
    "forgetful": (replace(GOOD, trainer=Forgetful), {"elastic state", "going on"}),
    "no gradient": (replace(GOOD, cannot={}), {"gradients through"}),
}


def with_faults(_here: Here) -> dict[str, dict[str, str]]:
    found = {}
    for name, (adapter, wanted) in FAULTS.items():
        chosen = {check: CHECKS[check] for check in CHECKS if check in wanted or check == "type bool"}
        results = conformance.run(adapter, chosen)
        found[name] = {each.check: each.outcome.value for each in results}
        assert all(each.text for each in results if each.outcome is Outcome.FAILED)
    return found


def test_each_fault_is_found() -> None:
    reports = run_ranks(with_faults, 3)
    assert reports == [reports[0]] * 3
    for name, (_, wanted) in FAULTS.items():
        failed = {check for check, outcome in reports[0][name].items() if outcome == "failed"}
        assert failed - {"type bool"} == wanted, name
        if name != "another type":
            assert reports[0][name]["type bool"] == "passed"  # the ranks continued after the failed check


def misused(here: Here) -> None:
    with pytest.raises(ArgumentError, match=r"`cannot` names \['speed'\], which are not checks"):
        conformance.run(replace(GOOD, cannot={"speed": "it is slow"}))
    with pytest.raises(ArgumentError, match=r"no reason for \['huge'\]"):
        conformance.run(replace(GOOD, cannot={"huge": " "}))
    with pytest.raises(ArgumentError, match="runs on 3 ranks; this job has 2"):
        conformance.run(GOOD)
    assert here.size == 2
    lifecycle.shutdown()


def test_misuse_is_told() -> None:
    run_ranks(misused, 2)


@pytest.mark.parametrize("function", CHECKS.values(), ids=CHECKS)
def test_every_check_says_what_it_is(function: Callable[..., None]) -> None:
    assert (function.__doc__ or "").strip().endswith(".")
