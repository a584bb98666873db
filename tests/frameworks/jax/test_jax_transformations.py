"""Collectives inside JAX's transformations give the same results as without."""

import threading
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
from tests.support.later import framework
from tests.support.ranks import Here, run_ranks

jax = framework("jax")
mj = framework("multiring.jax")
jnp = framework("jax.numpy")


def test_transformations() -> None:
    for wrong in run_ranks(transform, 2, deadline_s=240.0):
        assert wrong == []


def transform(here: Here) -> list[str]:  # noqa: C901 -- a table of cases
    mj.init()

    def step(w: Any) -> Any:
        return jnp.tanh(mj.allreduce(jnp.sin(w * (here.rank + 1.0)), "average") * w)

    def doubled(w: Any) -> Any:
        return mj.allreduce(w, "average") * 2

    by_vjp, by_jvp = jax.custom_vjp(doubled), jax.custom_jvp(doubled)
    by_vjp.defvjp(lambda w: (doubled(w), None), lambda _, gradient: (doubled(gradient),))
    by_jvp.defjvp(lambda primals, tangents: (by_jvp(*primals), doubled(*tangents)))
    saved = jax.checkpoint_policies.dots_saveable
    times: dict[str, tuple[Callable[[Any], Any], int]] = {
        "checkpoint": (jax.checkpoint(step), 1),
        "checkpoint with a policy": (jax.checkpoint(step, policy=saved), 1),
        "nested checkpoints": (jax.checkpoint(lambda w: jax.checkpoint(step)(step(w))), 2),
        "scan": (lambda w: jax.lax.scan(lambda c, _: (step(c), c.sum()), w, None, length=3)[0], 3),
        "scan of checkpoints": (
            lambda w: jax.lax.scan(jax.checkpoint(lambda c, _: (step(c), None)), w, None, length=3)[0],
            3,
        ),
        "loop": (lambda w: jax.lax.fori_loop(0, 3, lambda _, c: step(c), w), 3),
        "branch": (lambda w: jax.lax.cond(w.sum() > -1e9, step, lambda w: w, w), 1),
        "inner jit": (jax.jit(step), 1),
        "static argument": (lambda w: jax.jit(lambda w, n: step(w) * n / n, static_argnums=1)(w, 3), 1),
    }
    at, wrong = jnp.arange(1.0, 4.0), []
    known: dict[tuple[Any, str], Any] = {}  # most of the time is compilation, so each expectation is computed once

    def compare(name: str, found: Callable[[Any], Any], wanted: Callable[[Any], Any]) -> None:
        def gradient(of: Callable[[Any], Any]) -> Any:
            return jax.grad(lambda w: (of(w) ** 2).sum())

        def over_rows(of: Callable[[Any], Any]) -> Any:
            return lambda w: jax.vmap(gradient(of))(jnp.stack([w, 2 * w]))

        ways = {
            "value": lambda of: of,
            "gradient": gradient,
            "jit": lambda of: jax.jit(gradient(of)),
            "vmap": over_rows,
        }
        for how, way in ways.items():
            try:
                got = way(found)(jnp.array(at))
            except Exception as error:  # noqa: BLE001 -- the test reports it
                wrong.append(f"{name}, {how}: {type(error).__name__}: {error}"[:300])
                continue
            if (wanted, how) not in known:
                known[wanted, how] = way(wanted)(jnp.array(at))
            want = known[wanted, how]
            if not np.allclose(got, want, atol=1e-5):
                wrong.append(f"{name}, {how}: {got}, want {want}")

    @cache
    def repeated(count: int) -> Callable[[Any], Any]:
        def run(w: Any) -> Any:
            for _ in range(count):
                w = step(w)
            return w

        return run

    for name, (function, count) in times.items():
        compare(name, function, repeated(count))
    given = jnp.array(at)
    if not np.allclose(jax.jit(step, donate_argnums=0)(given), step(at), atol=1e-5):
        wrong.append("donation")

    def of_sine(w: Any) -> Any:
        return doubled(jnp.sin(w))

    compare("custom_vjp", lambda w: by_vjp(jnp.sin(w)), of_sine)
    compare("custom_jvp", lambda w: by_jvp(jnp.sin(w)), of_sine)
    return wrong


def test_named_calls_of_many_threads() -> None:
    """Calls are matched by name in any order, on any number of CPUs."""
    assert run_ranks(call_in_threads, 2, 12, deadline_s=240.0) == [True, True]


def call_in_threads(here: Here, count: int) -> bool:
    mj.init()
    mj.allreduce(jnp.float32(0), name="first").block_until_ready()
    found: dict[int, float] = {}

    def call(number: int) -> None:
        found[number] = float(mj.allreduce(jnp.float32(number + here.rank), "sum", name=f"call {number}"))

    order = list(range(count))[:: 1 if here.rank else -1]
    threads = [threading.Thread(target=call, args=(number,)) for number in order]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found == {number: 2.0 * number + 1 for number in range(count)}


def test_ranks_that_wait_for_each_other_are_told_in_time() -> None:
    """Ranks that wait for each other in native code get an error in time."""
    for own, (text, seconds) in enumerate(run_ranks(wait_apart, 2, stall_warn_s=3.0, stall_timeout_s=60.0)):
        assert 0.4 < seconds < 50.0  # after a minute, the time-out would end the wait
        assert f"operation 'allreduce.mine{own}': the ranks wait for each other: rank 0 waits for operation" in text


def wait_apart(here: Here) -> tuple[str, float]:
    mj.init()
    mj.allreduce(jnp.ones(3)).block_until_ready()
    began_s = time.monotonic()
    with pytest.raises(jax.errors.JaxRuntimeError) as raised:
        jax.block_until_ready(jax.jit(lambda x: mj.allreduce(x, name=f"mine{here.rank}"))(jnp.ones(3)))
    return str(raised.value), time.monotonic() - began_s
