"""Join the job, and let Ctrl-C end a wait within a program."""

import atexit
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any

import jax
import numpy as np

from multiring._frontend import lifecycle
from multiring._frontend.requests.interrupts import fail_at_interrupts
from multiring._runtime.job.job import current, is_rank, when_changed
from multiring.jax.call import sets
from multiring.jax.devices import choose_gpu
from multiring.jax.library import target


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Join the job; see `multiring._frontend.lifecycle.init`.

    If this process sees several GPUs and JAX has not started, JAX sees only this rank's; see `devices.choose_gpu`.
    """
    _know_programs()
    lifecycle.init(comm, process_sets)
    choose_gpu()
    target()  # register the handler now, because programs from JAX's compilation cache are not traced
    fail_at_interrupts()
    _wait_at_exit()


class _Programs:
    """The rank and size for which programs were traced. Shapes, factors and roots in programs depend on them."""

    def __init__(self) -> None:
        self._place: tuple[int, int] | None = None

    def trace_anew(self) -> None:
        """Make JAX trace all programs again if this process's rank or the number of ranks has changed.

        JAX also traces all programs again if they use process sets or groups. Such programs contain the numbers of the
        sets, and a number may belong to another set in another job.
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
    """Delay the process's exit until all programs of its main thread have ended, because other ranks may wait."""
    atexit.register(wait_for_programs)


def wait_for_programs() -> None:
    """Wait until all programs that this thread has started have ended.

    Programs run in order, so this function starts one more program and waits for its end.
    """
    with suppress(Exception):
        jax.block_until_ready(_one_more()(np.zeros(2048, np.float32)))


@cache
def _one_more() -> Callable[[Any], Any]:
    """Return a program that is so large that XLA does not run it on the calling thread."""
    return jax.jit(jax.numpy.square)
