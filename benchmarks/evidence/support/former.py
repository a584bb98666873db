"""Names of multiring that a checkout of `--against` may have under a former name.

A case that fails to import shows no fault of the old tree, so evidence programs take renamed things from here.
"""

from importlib import import_module
from typing import Any


def either(now: str, before: str) -> Any:
    """Return what one of two paths `module:attribute` names; the first one if this multiring has it.

    Raises:
        ImportError: this multiring has neither.
    """
    for path in (now, before):
        module, name = path.split(":")
        try:
            return getattr(import_module(module), name)
        except (ImportError, AttributeError):
            continue
    raise ImportError(f"this multiring has neither {now} nor {before}")


Cosine = either("multiring.convergence:Cosine", "multiring.optim:Cosine")
open_storage = either("multiring.data.readers.storage:open_storage", "multiring.data.readers.storage:storage_of")


def jax_allreduce() -> Any:
    """Return the all-reduce of `multiring.jax`. It imports JAX, which only some ranks need."""
    return either("multiring.jax:allreduce", "multiring.jax:all_reduce")
