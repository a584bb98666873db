"""multiring.keras under Horovod's name, for programs written for Horovod."""

from typing import Any

from horovod.keras import callbacks, elastic
from multiring import keras
from multiring._frontend.build_questions import *  # noqa: F403 -- what the adapter's public names leave out
from multiring.keras import *  # noqa: F403 -- all names, except those defined below


def DistributedOptimizer(  # type: ignore[no-redef] # noqa: N802 -- Horovod's name, and parameters
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = keras.Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int | str = keras.Average,
    num_groups: int = 0,
    groups: Any = None,
) -> Any:
    """Call `multiring.keras.DistributedOptimizer` with Horovod's parameters.

    multiring's function has more parameters, in another order.
    """
    return keras.DistributedOptimizer(
        optimizer,
        name,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        gradient_predivide_factor,
        op,
        num_groups=num_groups,
        groups=groups,
    )


def allreduce(  # type: ignore[no-redef] # Horovod's parameters
    value: Any,
    name: str | None = None,
    average: bool | None = True,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: int | str | None = None,
    compression: Any = keras.Compression.none,
) -> Any:
    """Call `multiring.keras.allreduce` with Horovod's default for `average`, True."""
    chosen = op if op is not None or average is None else keras.Average if average else keras.Sum
    return keras.allreduce(value, name, None, prescale_factor, postscale_factor, chosen, compression)
