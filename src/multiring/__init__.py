"""Deep-learning training on many processors, for any framework.

Collectives run schedules that are proven correct:

    import multiring

    group = multiring.init()
    group.all_reduce(gradients, op="average")

`multiring run -n 2 script.py` starts such a script on two ranks of this machine. `multiring.run(function, ranks=2)`
starts a function on two ranks, for example from a notebook.
"""

from typing import TYPE_CHECKING

from multiring._first_use import import_on_first_use
from multiring._version import VERSION as __version__

if TYPE_CHECKING:
    from multiring._frontend.requests.failures import error_of as error_of
    from multiring._launch import run as run
    from multiring._runtime import (
        Event as Event,
    )
    from multiring._runtime import (
        Group as Group,
    )
    from multiring._runtime import (
        Handle as Handle,
    )
    from multiring._runtime import (
        drain_events as drain_events,
    )
    from multiring._runtime import (
        init as init,
    )
    from multiring._runtime import (
        is_initialized as is_initialized,
    )
    from multiring._runtime import (
        local_rank as local_rank,
    )
    from multiring._runtime import (
        local_size as local_size,
    )
    from multiring._runtime import (
        quantize_dequantize as quantize_dequantize,
    )
    from multiring._runtime import (
        rank as rank,
    )
    from multiring._runtime import (
        shutdown as shutdown,
    )
    from multiring._runtime import (
        size as size,
    )
    from multiring._runtime import (
        start_timeline as start_timeline,
    )
    from multiring._runtime import (
        stop_timeline as stop_timeline,
    )
    from multiring._runtime import (
        world as world,
    )
    from multiring._steps.step_counters import log_metrics as log_metrics

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
    "log_metrics",
    "quantize_dequantize",
    "rank",
    "run",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
    "world",
]

_ELSEWHERE = {
    "multiring._frontend.requests.failures": ["error_of"],
    "multiring._launch": ["run"],
    "multiring._steps.step_counters": ["log_metrics"],
}
_OF_RUNTIME = [name for name in __all__ if name not in ("__version__", "error_of", "log_metrics", "run")]
import_on_first_use(__name__, {**_ELSEWHERE, "multiring._runtime": _OF_RUNTIME}, __all__)
