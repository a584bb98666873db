"""Rank 0 was killed: its new process has no commit, and all ranks go on from a rank that has one."""

from typing import Any

import pytest
from tests.support.later import framework
from tests.support.plain import enter
from tests.support.ranks import Here, Process, run_ranks

torch = framework("torch")
jnp = framework("jax.numpy")
mt = framework("multiring.torch")
mj = framework("multiring.jax")
tf = framework("tensorflow")
mtf = framework("multiring.tensorflow")


def torch_state(value: float) -> tuple[Any, Any]:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=value / 100)
    sampler = mt.elastic.ElasticSampler(list(range(12)), shuffle=False)
    state = mt.elastic.TorchState(model, optimizer, sampler=sampler, number=value)

    def values() -> list[float]:
        rates = [group["lr"] * 100 for group in optimizer.param_groups]
        return [state.number, *model.weight.detach()[0].tolist(), *rates, float(len(sampler))]

    def change(to: float) -> None:
        state.number = to
        model.weight.data.fill_(to)
        optimizer.param_groups[0]["lr"] = to / 100
        sampler.record_batch(int(to), 1)

    return state, (values, change)


def jax_state(value: float) -> tuple[Any, Any]:
    state = mj.elastic.JaxState(weights=jnp.full(2, value), number=value)

    def change(to: float) -> None:
        state.weights, state.number = jnp.full(2, to), to

    return state, (lambda: [state.number, *state.weights.tolist()], change)


def tensorflow_state(value: float) -> tuple[Any, Any]:
    variable = tf.Variable([value, value])
    state = mtf.elastic.TensorFlowState([variable], number=value)

    def change(to: float) -> None:
        state.number = to
        variable.assign([to, to])

    return state, (lambda: [state.number, *variable.numpy().tolist()], change)


STATES: dict[str, Any] = {"torch": torch_state, "jax": jax_state, "tensorflow": tensorflow_state}


def continued(here: Here, name: str) -> tuple[list[float], list[float]]:
    """Commit on all ranks, and return what they committed and what they have after rank 0 was replaced."""
    enter()
    adapter = {"torch": mt, "jax": mj, "tensorflow": mtf}[name]
    adapter.init()
    state, (values, change) = STATES[name](1.0)
    change(3.0)
    state.commit()
    committed = values()
    if here.rank == 0:  # as a new process
        state, (values, change) = STATES[name](1.0)
    found: list[list[float]] = []
    adapter.elastic.run(lambda _: found.append(values()))(state)
    return committed, found[0]


@pytest.mark.parametrize("name", STATES)
def test_all_ranks_take_the_state_of_a_rank_with_a_commit(name: str) -> None:
    process = Process(nursery={"torch": "torch", "jax": "jax", "tensorflow": "tensorflow"}[name])
    (committed, _), *_ = found = run_ranks(continued, 3, name, process=process, deadline_s=240.0)
    assert committed[0] == 3.0
    assert [each for _, each in found] == [committed] * 3
