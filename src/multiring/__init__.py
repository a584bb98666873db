"""Deep-learning training on many processors, for any framework.

Collectives run schedules that are proven correct:

    import multiring

    group = multiring.init()
    group.all_reduce(gradients, op="average")

`multiring run -n 2 script.py` starts such a script on two ranks of this machine. `multiring.run(function, ranks=2)`
starts a function on two ranks, for example from a notebook.
"""

from typing import TYPE_CHECKING, Any

from multiring._former_names import refuse
from multiring._runtime import (
    Event,
    Group,
    Handle,
    drain_events,
    init,
    is_initialized,
    local_rank,
    local_size,
    quantize_dequantize,
    rank,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
    world,
)
from multiring._version import VERSION as __version__

if TYPE_CHECKING:
    from multiring._frontend.requests.failures import error_of as error_of
    from multiring._launch import run as run

__all__ = [
    "Event",
    "Group",
    "Handle",
    "__version__",
    "drain_events",
    "error_of",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "quantize_dequantize",
    "rank",
    "run",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
    "world",
]


def __getattr__(name: str) -> Any:
    """Import `run` or `error_of` on first use.

    Their modules take time to import, and few ranks need them.
    """
    found: Any
    if name == "run":
        from multiring._launch import run as found  # noqa: PLC0415 -- imported on first use
    elif name == "error_of":
        from multiring._frontend.requests.failures import error_of as found  # noqa: PLC0415 -- imported on first use
    else:
        refuse(__name__, name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    """Return the public names only."""
    return __all__
