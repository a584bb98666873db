"""init, which also sees to it that Ctrl-C ends a wait within a program."""

from typing import Any

from multiring.frontend import lifecycle
from multiring.frontend.requests.interrupts import fail_at_interrupts
from multiring.jax.library import target


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Join the job; see `multiring.frontend.lifecycle.init`."""
    lifecycle.init(comm, process_sets)
    target()  # programs of JAX's compilation cache call it without being traced
    fail_at_interrupts()
