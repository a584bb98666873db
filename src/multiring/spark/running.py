"""`multiring.spark.run`: call a function on all ranks of a job, and return the results."""

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
from multiring.errors import LaunchError, StateError, UnsupportedError
from multiring.spark.job import BarrierJob

OLDEST = (3, 5)
START_S = 600.0  # Horovod's default, because executors may start on demand


def run(  # noqa: PLR0913 -- what the call is, and where it runs
    function: Callable[..., Any],
    num_proc: int | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    env: Mapping[str, str] | None = None,
    start_timeout_s: float = START_S,
    horovod: bool = False,
) -> list[Any]:
    """Call a function on `num_proc` ranks of the active Spark application, and return its results by rank.

    Each rank is a process of its own, which a task of a barrier stage starts and watches. Spark starts all tasks of
    such a stage together. In the function, `multiring.init()` joins the job. The ranks' output is in the executors'
    logs.

    Args:
        function: the function, called as `function(*args, **kwargs)`.
        num_proc: the number of ranks. Default: `spark.default.parallelism`.
        args: positional arguments.
        kwargs: keyword arguments.
        env: variables to set for the ranks.
        start_timeout_s: how many seconds the executors may take to have a slot for each rank.
        horovod: whether `import horovod` means multiring in the ranks.

    Raises:
        ArgumentError: an argument is invalid, or the function or its arguments cannot be pickled.
        StateError: this process has no active Spark application.
        UnsupportedError: the session is one of Spark Connect, which has no barrier stages.
        LaunchError: Spark is missing or too old, there are too few slots, an executor has another version of
            multiring, or a rank failed. The text has the traceback of the rank. Spark ends the other ranks.
    """
    check_function(function)
    context = active_context()
    count = check_workers(context.defaultParallelism if num_proc is None else num_proc)
    call = pickled_call(function, tuple(args), dict(kwargs or {}))
    variables = variables_to_hand_on(inherited_environment(), dict(env or {}))
    return BarrierJob(context, count, check_start_timeout(start_timeout_s)).run(call, variables, horovod=horovod)


def active_context() -> Any:
    """Return the active SparkContext.

    Raises:
        LaunchError: Spark is not installed, or too old.
        StateError: there is no active Spark application.
        UnsupportedError: the session is one of Spark Connect.
    """
    try:
        import pyspark  # noqa: PLC0415 -- only programs that use Spark need it
        from pyspark.sql import SparkSession  # noqa: PLC0415 -- as above
    except ImportError as error:
        raise LaunchError(f"multiring.spark needs Spark: pip install 'multiring[spark]' ({error})") from None
    check_release("pyspark", pyspark.__version__, OLDEST)
    context = pyspark.SparkContext._active_spark_context  # noqa: SLF001 -- Spark has no public name for it
    if context is not None:
        return context
    if SparkSession.getActiveSession() is not None:
        raise UnsupportedError("this session is one of Spark Connect, which has no barrier stages: use a SparkContext")
    raise StateError("there is no active Spark application: make a SparkSession before multiring.spark.run")
