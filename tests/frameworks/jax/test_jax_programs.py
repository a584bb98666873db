"""JAX programs: order of collectives, unused results, derivatives, failures, exit."""

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.support.faults import interrupt
from tests.support.later import framework
from tests.support.ranks import Here, report_of, run_ranks

from multiring.errors import ArgumentError, UnsupportedError

jax = framework("jax")
mj = framework("multiring.jax")
jnp = framework("jax.numpy")
PATIENT_S = 240.0  # compilation is slow on few cores


def slow(is_so: bool) -> Any:  # noqa: FBT001 -- a constant of the program
    """Return zero, after some computation if `is_so`."""
    if not is_so:
        return 0.0
    square = jnp.full((200, 200), 1e-3)
    for _ in range(10):
        square = jnp.sin(square @ square)
    return 0 * square[0, 0]


def in_order(here: Here) -> None:
    """Independent calls keep their order, although the ranks' programs differ."""
    mj.init()
    own, ranks = here.rank, here.size

    def two(x: Any, y: Any) -> Any:
        first = mj.allreduce(x + slow(own == 0), "sum")
        return first, mj.allreduce(y + slow(own == 1), "sum", name="another")

    both = jax.jit(two)
    one, other = (jax.jit(lambda x, number=number: mj.allreduce(x + slow(own == number), "sum")) for number in range(2))
    for _ in range(10):
        found = [*both(1.0, 10.0), one(100.0), other(1000.0), mj.allreduce(1e4, "sum"), mj.allreduce(1e5, "sum")]
        assert [float(each) for each in reversed(found)] == [ranks * 10.0**power for power in (5, 4, 3, 2, 1, 0)]


def test_calls_keep_their_order_where_programs_differ() -> None:
    run_ranks(in_order, 2, deadline_s=PATIENT_S)


def unused(here: Here) -> None:
    """Both ranks make the calls, although only rank 0 uses their results."""
    mj.init()
    is_first = here.rank == 0

    def program(x: Any) -> Any:
        plain = mj.allreduce(x, "sum")
        inner = jax.jit(lambda y: mj.allreduce(y, "sum"))(x)

        def body(carried: Any, _: Any) -> Any:
            found = mj.allreduce(carried, "sum")
            return (found if is_first else carried), None

        looped = jax.lax.scan(body, x, None, length=3)[0]
        return (plain, inner, looped) if is_first else x

    compiled = jax.jit(program)
    for _ in range(3):
        found = compiled(jnp.float32(1))
    if is_first:
        assert [float(each) for each in found] == [2, 2, 4]  # the loop adds rank 1's value, 1, three times
    mj.barrier()


def test_a_call_is_made_whoever_uses_its_results() -> None:
    run_ranks(unused, 2, deadline_s=PATIENT_S)


def derived(here: Here) -> None:
    mj.init()
    own, ranks = here.rank, here.size
    total = sum(range(1, ranks + 1))
    value, moved = jax.jvp(lambda x: mj.allreduce(x, "sum", name="pushed"), (1.0,), (own + 1.0,))
    assert (float(value), float(moved)) == (ranks, total)
    mixed = {"a": jnp.ones(2), "b": jnp.ones(2, jnp.int32)}  # integers have no gradients

    def loss(tree: Any) -> Any:
        found = mj.allreduce(tree, "sum")
        return (own + 1) * (found["a"].sum() + found["b"].sum())

    found = jax.jit(jax.grad(loss, allow_int=True))(mixed)
    assert found["a"].tolist() == [total] * 2

    def looped(x: Any) -> Any:
        return (own + 1) * jax.lax.scan(lambda c, _: (mj.allreduce(2 * c), None), x, None, length=3)[0]

    assert float(jax.jit(jax.grad(looped))(1.0)) == 8 * total / ranks
    rows = jnp.arange(3.0 * 2 * ranks).reshape(3, 2 * ranks)
    gathered = jax.vmap(mj.allgather)(rows + own)
    assert gathered.shape == (3, 2 * ranks * ranks)
    assert gathered[:, :: 2 * ranks].tolist() == [
        [float(2 * ranks * k + rank) for rank in range(ranks)] for k in range(3)
    ]
    scattered = jax.vmap(lambda each: mj.reducescatter(each, "sum"))(rows)
    assert scattered.tolist() == (ranks * rows)[:, 2 * own : 2 * own + 2].tolist()
    with pytest.raises(UnsupportedError, match=r"want Average or Sum, or jax\.lax\.stop_gradient"):
        jax.grad(lambda x: mj.allreduce(x, "max"))(1.0)
    step = jax.jit(lambda x, y: (mj.allreduce(x, "sum"), y + 1), donate_argnums=0)
    given = jnp.ones(1000)
    assert step(given, 1.0)[0].tolist() == [ranks] * 1000
    assert given.is_deleted()


def test_derivatives_and_vmap() -> None:
    run_ranks(derived, 2, deadline_s=PATIENT_S)


def misused(_here: Here) -> None:
    mj.init()
    leaked: list[Any] = []
    jax.jit(lambda x: leaked.append(mj.allreduce(x)))(1.0)
    with pytest.raises(ArgumentError, match="return the array from that function"):
        mj.allreduce(leaked[0])
    mesh = jax.sharding.Mesh(jax.devices(), "x")
    rows = jax.sharding.PartitionSpec("x")
    many = len(jax.devices())
    sharded = jax.shard_map(mj.allreduce, mesh=mesh, in_specs=rows, out_specs=rows)
    for function in (sharded, jax.jit(sharded), jax.pmap(mj.allreduce)):
        with pytest.raises(UnsupportedError, match="each rank has one device"):
            function(jnp.ones(many))
    assert float(mj.allreduce(jnp.float32(1), "sum")) == 2  # the next operation works


def test_misuse_is_told() -> None:
    run_ranks(misused, 2, deadline_s=PATIENT_S)


def failing(here: Here) -> tuple[int, list[float], int]:
    mj.init()
    state = mj.elastic.JaxState(parameters={"a": jnp.zeros(1), "key": jax.random.key(here.rank)}, step=0)
    failures = 0
    add = jax.jit(lambda x, n: x + mj.allreduce(jnp.ones(n))[0], static_argnums=1, donate_argnums=0)

    def train(state: Any) -> None:
        nonlocal failures
        while state.step < 6:
            goes_wrong = state.step == 3 and failures == 0
            failures += goes_wrong
            state.parameters["a"] = add(state.parameters["a"], 2 + goes_wrong * here.rank)
            state.step += 1
            if state.step % 2 == 0:
                state.commit()

    mj.elastic.run(train)(state)
    keys = mj.allgather_object(jax.random.key_data(state.parameters["key"]).tolist())
    assert keys[0] == keys[1]
    return state.step, state.parameters["a"].tolist(), failures


def test_elastic_states_go_back_to_the_last_commit() -> None:
    assert run_ranks(failing, 2, deadline_s=PATIENT_S) == [(6, [6.0], 1)] * 2


def waiting_alone(here: Here, over: str) -> float:
    mj.init()
    if here.rank == 1:
        until = time.monotonic() + 240
        while not Path(over).exists() and time.monotonic() < until:
            time.sleep(0.05)
        return 0.0
    program = jax.jit(mj.allreduce).lower(jnp.ones(2)).compile()
    here.reach("waiting")
    started = time.monotonic()
    try:
        jax.block_until_ready(program(jnp.ones(2)))
    except KeyboardInterrupt:
        return time.monotonic() - started
    finally:
        Path(over).touch()
    return 0.0


def test_an_interrupt_ends_a_wait(tmp_path: Path) -> None:
    faults = [interrupt(0).at("waiting").after(1.0)]
    report = report_of(waiting_alone, 2, str(tmp_path / "over"), faults=faults)
    # The required limit is 1 s after the signal. The wait would last as long as rank 1 does not come: for ever.
    assert 0 < report.outcomes[0].value < 100


LAST_WORDS = """
import jax, jax.numpy as jnp, multiring.jax as mj
mj.init()
def step(x):
    square = jnp.full((400, 400), 1e-3)
    for _ in range(30 if mj.rank() else 1):
        square = jnp.sin(square @ square)
    return mj.allreduce(x + 0 * square[0, 0])
jax.jit(step)(1.0)
"""


def test_a_program_ends_with_its_last_call_in_flight() -> None:
    command = [sys.executable, "-m", "multiring", "run", "-n", "2", "--", sys.executable, "-c", LAST_WORDS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert "Error" not in done.stderr
