"""`horovod.spark.run`: run a function on several ranks of a Spark application."""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from multiring import spark
from multiring._settings import environment_of, inherited_environment
from multiring.errors import ArgumentError, UnsupportedError

_START_S = 600.0
_START_VARIABLE = "HOROVOD_SPARK_START_TIMEOUT"


def run(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    start_timeout: float | None = None,
    use_mpi: bool | None = None,
    use_gloo: bool | None = None,  # noqa: ARG001 -- "without MPI" is always true
    extra_mpi_args: str | None = None,
    env: Mapping[str, str] | None = None,
    stdout: Any = None,
    stderr: Any = None,
    verbose: int = 1,  # noqa: ARG001 -- errors are always reported, and nothing else
    nics: Sequence[str] | set[str] | str | None = None,
    prefix_output_with_timestamp: bool = False,
    executable: str | None = None,
) -> list[Any]:
    """Call `fn` on `num_proc` ranks of the active Spark application, and return the results by rank.

    Args:
        fn: a function.
        args: positional arguments.
        kwargs: keyword arguments.
        num_proc: the number of ranks. Default: `spark.default.parallelism`.
        start_timeout: seconds that the executors may take to have a slot for each rank. Default:
            HOROVOD_SPARK_START_TIMEOUT, or 600.
        use_mpi: not available.
        use_gloo: no effect. It means "without MPI", which is always true.
        extra_mpi_args: not available.
        env: variables to set for the ranks.
        stdout: not available, because the ranks' output is in the executors' logs.
        stderr: not available, for the same reason.
        verbose: no effect.
        nics: the interface on which the ranks listen: one name.
        prefix_output_with_timestamp: not available.
        executable: not available: the ranks' Python is that of Spark's Python workers (PYSPARK_PYTHON).

    Raises:
        ArgumentError: a value is invalid, or the function cannot be pickled.
        StateError: there is no active Spark application.
        UnsupportedError: one of the arguments that are not available is given.
        LaunchError: the ranks could not be started, or a rank failed; see `multiring.spark.run`.
    """
    if use_mpi or extra_mpi_args:
        raise UnsupportedError("use_mpi and extra_mpi_args: multiring starts the ranks itself, without MPI")
    if stdout is not None or stderr is not None or prefix_output_with_timestamp:
        raise UnsupportedError(
            "stdout, stderr and prefix_output_with_timestamp: the ranks' output is in the executors' logs"
        )
    if executable not in (None, sys.executable):
        raise UnsupportedError(f"executable={executable!r}: set PYSPARK_PYTHON, the Python of Spark's workers")
    names = [nics] if isinstance(nics, str) else sorted(nics or ())
    if len(names) > 1:
        raise UnsupportedError(f"nics={names}: want one interface; MULTIRING_RAILS lists several")
    variables = {**(environment_of(interface=names[0]) if names else {}), **(env or {})}
    return spark.run(
        fn,
        num_proc,
        args,
        kwargs,
        env=variables,
        start_timeout_s=_start_s() if start_timeout is None else start_timeout,
        horovod=True,
    )


def run_elastic(*_: Any, **__: Any) -> None:
    """Raise UnsupportedError: the number of ranks is fixed."""
    raise UnsupportedError("horovod.spark.run_elastic: the number of ranks is fixed; call horovod.spark.run")


def _start_s() -> float:
    text = inherited_environment().get(_START_VARIABLE)
    try:
        return _START_S if text is None else float(text)
    except ValueError:
        raise ArgumentError(f"{_START_VARIABLE}={text!r}: want seconds") from None
