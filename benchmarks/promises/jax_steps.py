"""Measure the time that JAX adds to a collective.

    multiring run -n 2 -- python benchmarks/promises/jax_steps.py

The program times three things alternately: a jitted step that reduces 100 leaves of 1 MiB in total, the same step
without the reduction, and the plain collective on its own memory. The figures are medians.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np

import multiring
import multiring.jax as mj

MOST_MS = 0.5  # the most that a jitted step of 100 leaves may add
ROUNDS, REPEATS = 15, 40
LEAVES, BYTES = 100, 1 << 20


def main() -> None:
    """Measure the times; exit with 1 if the floor is missed."""
    mj.init()
    leaves = [jax.numpy.ones(BYTES // 4 // LEAVES) for _ in range(LEAVES)]

    def step(is_shared: bool, tree: Any) -> Any:  # noqa: FBT001 -- of two programs
        gradients = [each * 0.5 for each in tree]
        return [each * 2.0 for each in (mj.allreduce(gradients) if is_shared else gradients)]

    def run(program: Callable[..., Any]) -> None:
        for leaf in program(leaves):
            leaf.block_until_ready()

    array = np.ones(BYTES // 4, np.float32)
    shared, alone = (partial(run, jax.jit(partial(step, each))) for each in (True, False))
    with_it, raw, without = by_turns(shared, partial(multiring.world().all_reduce, array, op="average"), alone)
    added = with_it - without - raw
    mj.print_once(
        f"a jitted step of {LEAVES} leaves of {BYTES} B in all: {with_it:.3f} ms; alone {without:.3f} ms, the "
        f"collective itself {raw:.3f} ms: {added:.3f} ms added; floor {MOST_MS} ms"
    )
    if added > MOST_MS:
        raise SystemExit(1)


def by_turns(*functions: Callable[[], Any]) -> list[float]:
    """Return each function's median milliseconds over ROUNDS rounds of REPEATS calls."""
    found: list[list[float]] = [[] for _ in functions]
    for number in range(ROUNDS + 1):
        for times, function in zip(found, functions, strict=True):
            multiring.world().barrier()
            start = time.perf_counter()
            for _ in range(REPEATS):
                function()
            if number:  # the first round traces, plans and allocates
                times.append((time.perf_counter() - start) / REPEATS * 1e3)
    return [statistics.median(times) for times in found]


if __name__ == "__main__":
    main()
