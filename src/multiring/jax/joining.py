"""init, which also sees to it that Ctrl-C ends a wait within a program."""

import atexit
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any

import jax
import numpy as np

from multiring.frontend import lifecycle
from multiring.frontend.requests.interrupts import fail_at_interrupts
from multiring.jax.call import sets
from multiring.jax.library import target
from multiring.runtime.job.job import current, is_rank, when_changed


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Join the job; see `multiring.frontend.lifecycle.init`."""
    _know_programs()
    lifecycle.init(comm, process_sets)
    target()  # programs of JAX's compilation cache call it without being traced
    fail_at_interrupts()
    _wait_at_exit()


class _Programs:
    """For which place in a job programs were traced: shapes, factors and roots in them follow from it."""

    def __init__(self) -> None:
        self._place: tuple[int, int] | None = None

    def trace_anew(self) -> None:
        """Have JAX trace all programs anew where this process is another rank by now, or of another number of them.

        Process sets and groups have numbers in programs, which may be another set's in another job.
        """
        if not is_rank():
            return
        membership = current().membership
        place = membership.rank, membership.size
        if self._place not in {None, place} or len(sets) > 1:
            jax.clear_caches()
            for number in sets.keys() - {0}:
                del sets[number]
        self._place = place


@cache
def _know_programs() -> _Programs:
    known = _Programs()
    known.trace_anew()
    when_changed(known.trace_anew)
    return known


@cache
def _wait_at_exit() -> None:
    """Have the process end only when the programs that its main thread has started have: ranks may wait for them."""
    atexit.register(wait_for_programs)


def wait_for_programs() -> None:
    """Return when the programs that this thread has started have ended.

    They run in their order, so that it is enough to wait for one more.
    """
    with suppress(Exception):
        jax.block_until_ready(_one_more()(np.zeros(2048, np.float32)))


@cache
def _one_more() -> Callable[[Any], Any]:
    """Return a program that is large enough for XLA not to run it at once, on the thread that calls it."""
    return jax.jit(jax.numpy.square)
