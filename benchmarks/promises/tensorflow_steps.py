"""Measure the time that TensorFlow adds to a collective.

    multiring run -n 2 -- python benchmarks/promises/tensorflow_steps.py

The program times eager sums of one tensor, and a compiled step that reduces 100 gradients of 1 MiB in total. Each
alternates with the plain collective on its own memory. The figures are medians.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

import multiring
import multiring.tensorflow as mt

MOST_MS = 1.0  # the most that a compiled step of 100 gradients may add
ROUNDS = 15
TENSORS, BYTES = 100, 1 << 20


def main() -> None:
    """Measure the times; exit with 1 if the floor is missed."""
    mt.init()
    for size, repeats in ((64, 200), (1 << 20, 40), (8 << 20, 10), (64 << 20, 3)):
        tensor, array = tf.ones([size // 4]), np.ones(size // 4, np.float32)
        eager, raw = by_turns(repeats, partial(mt.allreduce, tensor), partial(summed, array))
        mt.print_once(f"eager allreduce of {size} B: {eager:.3f} ms, the collective itself {raw:.3f} ms")
    variables = [tf.Variable(tf.ones([BYTES // 4 // TENSORS])) for _ in range(TENSORS)]

    def step(is_shared: bool) -> None:  # noqa: FBT001 -- of two programs
        gradients = [variable * 0.5 for variable in variables]
        found = mt.grouped_allreduce(gradients) if is_shared else gradients
        for variable, gradient in zip(variables, found, strict=True):
            variable.assign(gradient * 2.0)

    shared, alone = (tf.function(partial(step, each)) for each in (True, False))
    array = np.ones(BYTES // 4, np.float32)
    with_it, raw, without = by_turns(40, shared, partial(summed, array), alone)
    added = with_it - without - raw
    mt.print_once(
        f"a compiled step of {TENSORS} gradients of {BYTES} B in all: {with_it:.3f} ms; alone {without:.3f} ms, the "
        f"collective itself {raw:.3f} ms: {added:.3f} ms added; floor {MOST_MS} ms"
    )
    if added > MOST_MS:
        raise SystemExit(1)


def summed(array: Any) -> None:
    """Reduce an array in place with the plain collective."""
    multiring.world().all_reduce(array, op="average")


def by_turns(repeats: int, *functions: Callable[[], Any]) -> list[float]:
    """Return the median milliseconds of each function over ROUNDS rounds of calls."""
    found: list[list[float]] = [[] for _ in functions]
    for number in range(ROUNDS + 1):
        for times, function in zip(found, functions, strict=True):
            multiring.world().barrier()
            start = time.perf_counter()
            for _ in range(repeats):
                function()
            if number:  # the first round traces, plans and allocates
                times.append((time.perf_counter() - start) / repeats * 1e3)
    return [statistics.median(times) for times in found]


if __name__ == "__main__":
    main()
