"""The tables of horovodrun's options and variables, and a reader of its YAML file."""

import argparse
import importlib
import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from multiring.errors import ArgumentError

_MEBIBYTE = 2**20


# Option -> (the variable that Horovod's launcher sets for it, type, function from value to text). multiring reads some
# of these variables. _launch/horovod.py gives the reasons why the other variables have no effect.
VALUES: Mapping[str, tuple[str, Callable[[str], Any], Callable[[Any], str]]] = MappingProxyType(
    {
        "fusion_threshold_mb": ("HOROVOD_FUSION_THRESHOLD", int, lambda mib: str(mib * _MEBIBYTE)),
        "cycle_time_ms": ("HOROVOD_CYCLE_TIME", float, str),
        "cache_capacity": ("HOROVOD_CACHE_CAPACITY", int, str),
        "autotune_log_file": ("HOROVOD_AUTOTUNE_LOG", str, str),
        "autotune_warmup_samples": ("HOROVOD_AUTOTUNE_WARMUP_SAMPLES", int, str),
        "autotune_steps_per_sample": ("HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE", int, str),
        "autotune_bayes_opt_max_samples": ("HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES", int, str),
        "autotune_gaussian_process_noise": ("HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE", float, str),
        "stall_check_warning_time_seconds": ("HOROVOD_STALL_CHECK_TIME_SECONDS", int, str),
        "stall_check_shutdown_time_seconds": ("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", int, str),
        "num_nccl_streams": ("HOROVOD_NUM_NCCL_STREAMS", int, str),
        "thread_affinity": ("HOROVOD_THREAD_AFFINITY", int, str),
        "gloo_timeout_seconds": ("HOROVOD_GLOO_TIMEOUT_SECONDS", int, str),
        "log_level": ("HOROVOD_LOG_LEVEL", str, str),
    }
)
SWITCHES: Mapping[str, tuple[str, Callable[[bool], str]]] = MappingProxyType(
    {
        "hierarchical_allreduce": ("HOROVOD_HIERARCHICAL_ALLREDUCE", lambda on: str(int(on))),
        "hierarchical_allgather": ("HOROVOD_HIERARCHICAL_ALLGATHER", lambda on: str(int(on))),
        "torus_allreduce": ("HOROVOD_TORUS_ALLREDUCE", lambda on: str(int(on))),
        "autotune": ("HOROVOD_AUTOTUNE", lambda on: str(int(on))),
        "timeline_mark_cycles": ("HOROVOD_TIMELINE_MARK_CYCLES", lambda on: str(int(on))),
        "no_stall_check": ("HOROVOD_STALL_CHECK_DISABLE", lambda on: str(int(on))),
        "mpi_threads_disable": ("HOROVOD_MPI_THREADS_DISABLE", lambda on: str(int(on))),
        "log_with_timestamp": ("HOROVOD_LOG_HIDE_TIME", lambda on: str(int(not on))),
    }
)
# Switch -> (options that turn the switch on, options that turn it off), if these options are not --NAME and --no-NAME.
SPELT: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = MappingProxyType(
    {
        "no_stall_check": (("--no-stall-check",), ("--stall-check",)),
        "log_with_timestamp": (
            ("--log-with-timestamp", "--no-log-hide-timestamp"),
            ("--log-without-timestamp", "--log-hide-timestamp"),
        ),
    }
)
# Section of the configuration file -> (prefix that turns a key into an option, exceptions: key -> option).
_SECTIONS: Mapping[str, tuple[str, Mapping[str, str]]] = MappingProxyType(
    {
        "params": ("", {}),
        "autotune": ("autotune_", {"enabled": "autotune"}),
        "timeline": ("timeline_", {}),
        "stall_check": ("stall_check_", {"enabled": "no_stall_check"}),
        "library_options": ("", {}),
        "logging": ("log_", {}),
    }
)
_CONTROLLERS = ("gloo", "mpi")


def option_of(name: str) -> str:
    """Return the spelling of option `name` on the command line."""
    return f"--{name.replace('_', '-')}"


def read_configuration(arguments: argparse.Namespace, path: Path) -> None:
    """Set options from a Horovod configuration file.

    Options of the command line override those of the file.

    Raises:
        ArgumentError: the file cannot be read, has an unknown key or an invalid value, or PyYAML is missing.
    """
    for section, keys in _read(path).items():
        if section == "controller":
            if keys not in _CONTROLLERS:
                raise ArgumentError(f"{path}: controller: {keys!r}, want {' or '.join(_CONTROLLERS)}")
            arguments.mpi = arguments.mpi or (keys == "mpi" and not arguments.gloo)
            continue
        if section not in _SECTIONS:
            known = ", ".join(("controller", *_SECTIONS))
            raise ArgumentError(f"{path}: unknown section {section!r}, want one of {known}")
        prefix, named = _SECTIONS[section]
        for key, value in (keys or {}).items():
            name = named.get(key, f"{prefix}{key}")
            made = _converted(f"{path}: {section}: {key}", name, value)
            if made is not None and getattr(arguments, name) is None:
                setattr(arguments, name, not made if name == "no_stall_check" else made)


def _read(path: Path) -> dict[str, Any]:
    if importlib.util.find_spec("yaml") is None:
        raise ArgumentError(f"--config-file {path}: reading YAML needs PyYAML: pip install pyyaml")
    yaml = importlib.import_module("yaml")
    try:
        table = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ArgumentError(f"cannot read the options in {path}: {error}") from None
    if not isinstance(table, dict) or not all(isinstance(keys, (dict, str, type(None))) for keys in table.values()):
        raise ArgumentError(f"{path}: want sections of options, like `params:` with `cycle_time_ms: 1` below it")
    return table


def _converted(where: str, name: str, value: Any) -> Any:
    """Return a value of the file converted to its option's type, or None if the file gives no value."""
    kind: Callable[[Any], Any]
    if name in SWITCHES:
        is_right, wanted, kind = isinstance(value, bool), "true or false", bool
    elif name in VALUES or name == "timeline_filename":
        kind = VALUES[name][1] if name in VALUES else Path
        is_right = isinstance(value, (int, float) if kind is float else int if kind is int else str)
        is_right, wanted = is_right and not isinstance(value, bool), _WANTED.get(kind, "text")
    else:
        raise ArgumentError(f"{where}: there is no such option")
    if value is not None and not is_right:
        raise ArgumentError(f"{where}: {value!r}, want {wanted}")
    return None if value is None else kind(value)


_WANTED: Mapping[Any, str] = MappingProxyType({int: "an integer", float: "a number"})
