"""`horovod.run`: run a function on several ranks, on this machine or on hosts that ssh reaches."""

import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from multiring._launch import FunctionOptions, JobOptions, hosts_beyond_this, parse_hostfile, run_function
from multiring._launch.horovod import interface_variables, ssh_words
from multiring._settings import environment_of
from multiring.errors import ArgumentError, UnsupportedError

_Value = TypeVar("_Value", int, "int | None")
_FAILED = "Horovod detected that one or more processes exited with non-zero status"  # programs search for this text


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
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
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
    """Call `func` on `num_proc` ranks and return the results.

    The results are ordered by rank. Ranks on other hosts are started by ssh, as by `multiring run --hosts`: each host
    needs this Python, this folder and the modules that `func` needs under the same paths.

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
        hosts: hosts with their numbers of places, such as `a:4,b:4`, filled in order. Default: this host.
        hostfile: a file with a line such as `a slots=4` for each host.
        host_discovery_script: not available, because the number of ranks does not change.
        start_timeout: seconds that each rank's `init` waits for all ranks.
        ssh_port: the port for ssh.
        ssh_identity_file: the key for ssh.
        disable_cache: no effect.
        output_filename: a folder. The output of rank K also goes to rank-K.out and rank-K.err in it.
        verbose: no effect.
        use_gloo: no effect. It means "without MPI", which is always true.
        use_mpi: not available.
        mpi_args: not available.
        network_interface: an older name of `network_interfaces`.
        network_interfaces: the interface on which ranks of different hosts listen (MULTIRING_INTERFACE), or several
            with commas, which become rails (MULTIRING_RAILS).
        executable: the Python of the ranks, default: this process's Python.
        np: an older name of `num_proc`.
        min_np: an older name of `min_num_proc`.
        max_np: an older name of `max_num_proc`.

    Raises:
        ArgumentError: a value or a combination of values is invalid.
        UnsupportedError: MPI, or a varying number of ranks is requested.
        LaunchError: a host cannot be used. Or a rank failed, and the others were stopped; then the rank's error is the
            cause (`__cause__`), and its traceback is in the text.
        KeyboardInterrupt: the user pressed Ctrl-C. It is raised after all ranks have ended.
    """
    ranks = _renamed("num_proc", num_proc, np)
    _refuse_elastic(
        ranks, _renamed("min_num_proc", min_num_proc, min_np), _renamed("max_num_proc", max_num_proc, max_np)
    )
    if host_discovery_script is not None:
        raise UnsupportedError(
            f"host_discovery_script={host_discovery_script!r}: the number of ranks does not change; "
            "pass hosts or hostfile"
        )
    if hosts is not None and hostfile is not None:
        raise ArgumentError(f"hosts={hosts!r} and hostfile={hostfile!r} both list hosts; pass only one of them")
    spelt = parse_hostfile(Path(hostfile)) if hostfile is not None else hosts
    if use_mpi or mpi_args:
        raise UnsupportedError("use_mpi and mpi_args: multiring starts the ranks itself; to use MPI, run mpiexec")
    environment = {} if start_timeout is None else environment_of(init_timeout_s=start_timeout)
    job = JobOptions(
        log_dir=Path(output_filename) if output_filename else None,
        horovod=True,
        variables=environment | interface_variables(network_interfaces or network_interface),
        ssh_words=ssh_words(ssh_port, ssh_identity_file),
    )
    options = FunctionOptions(
        job=job,
        python=executable or sys.executable,
        hosts=None if spelt is None else hosts_beyond_this(spelt, ranks),
        failed=_FAILED,
    )
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
