"""A rank whose group has no arrays meets the others in the same call, and not in a later one."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.support.ranks import Here, Process, run_ranks

from multiring._frontend import array_rows
from multiring.errors import ArgumentError, MismatchError


def one_rank_has_none(here: Here, call: str, name: str | None, count: int) -> list[Any]:
    here.join()
    group = getattr(array_rows, call)
    told: list[Any] = []
    for step in range(3):
        arrays = [np.full((2, 2), 10.0 * here.rank + step, np.float32)] * count
        try:
            found = group([] if here.rank == 0 and step == 1 else arrays, name=name)
        except MismatchError as error:
            told.append("mismatch" if "without arrays" in str(error) else str(error))
        except ArgumentError as error:
            told.append("mismatch" if here.rank == 0 and "no tensors" in str(error) else str(error))
        else:
            told.append([each.tolist() for each in found])
    return told


@pytest.mark.parametrize("call", ["grouped_allgather", "grouped_allreduce", "grouped_reducescatter"])
@pytest.mark.parametrize("name", [None, "outputs"])
@pytest.mark.parametrize("count", [1, 3])
def test_a_group_without_arrays_on_one_rank_is_a_mismatch(call: str, name: str | None, count: int) -> None:
    by_rank = run_ranks(one_rank_has_none, 2, call, name, count)
    assert [told[1] for told in by_rank] == ["mismatch"] * 2
    for step in (0, 2):
        values = [float(step), 10.0 + step]
        row = values if call == "grouped_allgather" else [sum(values) / 2]
        rows = [[each] * 2 for each in row for _ in range(1 if call == "grouped_reducescatter" else 2)]
        assert [told[step] for told in by_rank] == [[rows] * count] * 2


def all_have_none(here: Here) -> list[Any]:
    here.join()
    return [array_rows.grouped_allgather([]), array_rows.grouped_allgather([np.ones(1)])[0].tolist()]


def test_groups_without_arrays_on_all_ranks_are_right() -> None:
    assert run_ranks(all_have_none, 2) == [[[], [1.0, 1.0]]] * 2


def gradients_of(here: Here, framework: str) -> list[Any]:
    """Combine gradients in three steps, of which rank 0 has none in the second."""
    here.join()
    told: list[Any] = []
    for step in range(3):
        value = [] if here.rank == 0 and step == 1 else [np.array([10.0 * here.rank + step], np.float32)]
        try:
            told.append([each.tolist() for each in COMBINED[framework](value)])
        except Exception as error:  # noqa: BLE001 -- frameworks raise their own
            told.append("mismatch" if "agree" in f"{error} {error.__cause__}" else repr(error))
    return told


def by_tensorflow(arrays: list[Any]) -> list[Any]:
    import tensorflow as tf  # noqa: PLC0415 -- an optional framework

    import multiring.tensorflow as mt  # noqa: PLC0415 -- as above

    return [each.numpy() for each in mt.grouped_allreduce([tf.constant(each) for each in arrays])]


def by_jax(arrays: list[Any]) -> list[Any]:
    import jax.numpy as jnp  # noqa: PLC0415 -- an optional framework

    import multiring.jax as mj  # noqa: PLC0415 -- as above

    plain = SimpleNamespace(init=None, update=lambda gradients, state, _parameters: (gradients, state))
    found, _ = mj.distribute(plain).update([jnp.asarray(each) for each in arrays], None)
    return [np.asarray(each) for each in found]


COMBINED = {"tensorflow": by_tensorflow, "jax": by_jax}


@pytest.mark.parametrize("framework", COMBINED)
def test_a_rank_without_gradients_is_a_mismatch(framework: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(framework)
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "3")
    process = Process(
        nursery={"tensorflow": "keras"}.get(framework, framework), beforehand=(framework, f"multiring.{framework}")
    )
    by_rank = run_ranks(gradients_of, 2, framework, process=process, deadline_s=240.0)
    assert by_rank == [[[[5.0]], "mismatch", [[7.0]]]] * 2
