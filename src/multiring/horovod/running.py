"""`horovod.run`: run a function on several ranks of this machine."""

import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from multiring._launch import FunctionOptions, JobOptions, run_function
from multiring._launch.mpiexec import parse_hosts
from multiring._settings import environment_of
from multiring.errors import ArgumentError, UnsupportedError

_Value = TypeVar("_Value", int, "int | None")
_HERE = ("localhost", "127.0.0.1", "::1")
_FAILED = "Horovod detected that one or more processes exited with non-zero status"  # programs search for this text
_ELSEWHERE = (
    "horovod.run starts ranks on this machine only; for other hosts put the function into a script and start it with "
    "`multiring run --horovod --hosts {hosts} -- python script.py`"
)


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 1,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,  # noqa: ARG001 -- a parameter of elastic jobs
    reset_limit: int | None = None,  # noqa: ARG001 -- a parameter of elastic jobs
    cooldown_range: Sequence[int] | None = None,  # noqa: ARG001 -- a parameter of elastic jobs
    hosts: str | None = None,
    hostfile: str | None = None,
    host_discovery_script: str | None = None,
    start_timeout: float | None = None,
    ssh_port: int | None = None,  # noqa: ARG001 -- no ssh on this machine
    ssh_identity_file: str | None = None,  # noqa: ARG001 -- no ssh on this machine
    disable_cache: bool | None = None,  # noqa: ARG001 -- nothing is cached
    output_filename: str | None = None,
    verbose: int | None = None,  # noqa: ARG001 -- the launcher always prints errors, and nothing else
    use_gloo: bool | None = None,  # noqa: ARG001 -- "without MPI" is always true
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    network_interface: str | None = None,
    network_interfaces: str | None = None,
    executable: str | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
) -> list[Any]:
    """Call `func` on `num_proc` ranks of this machine and return the results.

    The results are ordered by rank.

    Args:
        func: a function. Without cloudpickle it must be importable by its name.
        args: positional arguments.
        kwargs: keyword arguments.
        num_proc: the number of ranks.
        min_num_proc: must be equal to `num_proc` if given, because the number of ranks does not change.
        max_num_proc: must be equal to `num_proc` if given.
        slots: no effect, because the number of ranks does not change.
        reset_limit: no effect, for the same reason.
        cooldown_range: no effect, for the same reason.
        hosts: `localhost:N` or `NAME:N` with this host's name, where N is at least `num_proc`. Default: this host.
        hostfile: not available.
        host_discovery_script: not available.
        start_timeout: seconds that each rank's `init` waits for all ranks.
        ssh_port: no effect.
        ssh_identity_file: no effect.
        disable_cache: no effect.
        output_filename: a folder. The output of rank K also goes to rank-K.out and rank-K.err in it.
        verbose: no effect.
        use_gloo: no effect. It means "without MPI", which is always true.
        use_mpi: not available.
        mpi_args: not available.
        network_interface: an older name of `network_interfaces`.
        network_interfaces: the interface on which ranks of different hosts would listen (MULTIRING_INTERFACE).
        executable: the Python of the ranks, default: this process's Python.
        np: an older name of `num_proc`.
        min_np: an older name of `min_num_proc`.
        max_np: an older name of `max_num_proc`.

    Raises:
        ArgumentError: a value or a combination of values is invalid.
        UnsupportedError: another host, MPI, or a varying number of ranks is requested.
        LaunchError: a rank failed, and the others were stopped. The rank's error is the cause (`__cause__`), and its
            traceback is in the text.
        KeyboardInterrupt: the user pressed Ctrl-C. It is raised after all ranks have ended.
    """
    ranks = _renamed("num_proc", num_proc, np)
    _refuse_elastic(
        ranks, _renamed("min_num_proc", min_num_proc, min_np), _renamed("max_num_proc", max_num_proc, max_np)
    )
    _refuse_other_hosts(hosts, hostfile or host_discovery_script, ranks)
    if use_mpi or mpi_args:
        raise UnsupportedError("use_mpi and mpi_args: multiring starts the ranks itself; to use MPI, run mpiexec")
    told = {"init_timeout_s": start_timeout, "interface": network_interfaces or network_interface}
    environment = environment_of(**{name: value for name, value in told.items() if value is not None})
    job = JobOptions(log_dir=Path(output_filename) if output_filename else None, horovod=True, variables=environment)
    options = FunctionOptions(job=job, python=executable or sys.executable, failed=_FAILED)
    return run_function(func, args, kwargs or {}, ranks, options)


def _renamed(name: str, value: _Value, older: int | None) -> _Value | int:
    if older is None:
        return value
    warnings.warn(f"{name.replace('num_proc', 'np')} is an older name of {name}", DeprecationWarning, stacklevel=3)
    return older if value in (None, 1) else value


def _refuse_elastic(ranks: int, least: int | None, most: int | None) -> None:
    if ranks < 1:
        raise ArgumentError(f"num_proc={ranks}: want at least 1")
    if any(bound not in (None, ranks) for bound in (least, most)):
        raise UnsupportedError(
            f"min_num_proc={least}, num_proc={ranks}, max_num_proc={most}: the number of ranks does not change; "
            "pass num_proc only"
        )


def _refuse_other_hosts(hosts: str | None, file: str | None, ranks: int) -> None:
    if hosts is not None and file is not None:
        raise ArgumentError(f"hosts={hosts!r} and {file!r} both list hosts; pass only one of them")
    if file is not None:
        raise UnsupportedError(f"hosts from {file!r}: {_ELSEWHERE.format(hosts='a:4,b:4')}")
    if hosts is None:
        return
    places = parse_hosts(hosts)
    if any(name not in (*_HERE, os.uname().nodename) for name, _ in places):
        raise UnsupportedError(f"hosts={hosts!r}: {_ELSEWHERE.format(hosts=hosts)}")
    if sum(count for _, count in places) < ranks:
        raise ArgumentError(
            f"hosts={hosts!r} has places for {sum(count for _, count in places)}, num_proc={ranks}: want fewer ranks, "
            "or more places"
        )
