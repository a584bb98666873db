"""`multiring.dask.run`: call a function on all ranks of a job, and return the results."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from multiring._launch.cluster_ranks import (
    check_function,
    check_release,
    check_start_timeout,
    check_workers,
    variables_to_hand_on,
)
from multiring._launch.pickled_call import pickled_call
from multiring._settings import inherited_environment
from multiring.dask.job import DaskJob
from multiring.errors import ArgumentError, LaunchError

OLDEST = (2024, 8)


def run(  # noqa: PLR0913 -- what the call is, and where it runs
    client: Any,
    function: Callable[..., Any],
    workers: int,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    env: Mapping[str, str] | None = None,
    start_timeout_s: float = 120.0,
) -> list[Any]:
    """Call a function on `workers` ranks of the Dask cluster, and return its results by rank.

    Each rank is a process of its own, which a task of Dask starts and watches; it takes one thread of a Dask worker. In
    the function, `multiring.init()` joins the job. The ranks' output is in the output of the Dask workers. All ranks
    have ended when this function returns or raises.

    Args:
        client: a `dask.distributed.Client` (not an asynchronous one).
        function: the function, called as `function(*args, **kwargs)`.
        workers: the number of ranks.
        args: positional arguments.
        kwargs: keyword arguments.
        env: variables to set for the ranks.
        start_timeout_s: how many seconds the start may take: until every rank has a free thread of a worker.

    Raises:
        ArgumentError: an argument is invalid, or the function or its arguments cannot be pickled.
        LaunchError: Dask is missing or too old, the cluster has too few threads, a worker has another version of
            multiring, or a rank failed. The other ranks were ended. The error that a rank raised is the cause
            (`__cause__`), and its traceback is in the text.
    """
    check_function(function)
    count = check_workers(workers)
    try:
        import distributed  # noqa: PLC0415 -- only programs that use Dask need it
    except ImportError as error:
        raise LaunchError(f"multiring.dask needs Dask: pip install 'multiring[dask]' ({error})") from None
    check_release("distributed", distributed.__version__, OLDEST)
    if not isinstance(client, distributed.Client) or client.asynchronous:
        raise ArgumentError(f"{client!r}: want a dask.distributed.Client that is not asynchronous")
    call = pickled_call(function, tuple(args), dict(kwargs or {}))
    variables = variables_to_hand_on(inherited_environment(), dict(env or {}))
    with DaskJob(client, count, check_start_timeout(start_timeout_s)) as job:
        ends = job.run(call, variables)
        if ends.has_failed:
            raise ends.error("multiring.dask.run: the function did not return on every rank")
        return ends.results()
