"""All environment variables that multiring reads.

Each has a name, type, unit, default and meaning. The variables are read when `Settings.from_environment` is called,
never at import. An explicit argument overrides the environment, and the environment overrides the default. A value that
cannot be parsed is an error.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields, replace
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import Any

from multiring import _setting_values as values
from multiring._foreign_variables import FOREIGN_VARIABLES
from multiring._setting_values import NEVER_S, Rail, nearest, text_of
from multiring.errors import ArgumentError

_PREFIX = "MULTIRING_"
_SHOWN = 100  # characters of an invalid value that an error shows
TIMELINE_LATER = "DYNAMIC"


def _setting(name: str, parse: Callable[[str], Any], default: Any, wanted: str, meaning: str) -> Any:
    return field(default=default, metadata={"name": name, "parse": parse, "wanted": wanted, "meaning": meaning})


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The settings of a process.

    A setting without a value and without a default is None.
    """

    rank: int | None = _setting("MULTIRING_RANK", values.rank, None, values.RANK, "this process's rank")
    size: int | None = _setting("MULTIRING_SIZE", values.size, None, values.SIZE, "number of ranks of the job")
    local_rank: int | None = _setting(
        "MULTIRING_LOCAL_RANK", values.rank, None, values.RANK, "this process's rank on its host, from 0"
    )
    local_size: int | None = _setting(
        "MULTIRING_LOCAL_SIZE", values.size, None, values.SIZE, "number of ranks on this host"
    )
    rendezvous: str | None = _setting(
        "MULTIRING_RENDEZVOUS", str, None, "host:port or @name", "address at which rank 0 listens during init"
    )
    secret: str | None = _setting("MULTIRING_SECRET", str, None, "any text", "secret that all ranks of the job share")
    secret_file: str | None = _setting("MULTIRING_SECRET_FILE", str, None, "a path", "file with the shared secret")
    job: str | None = _setting(
        "MULTIRING_JOB", str, None, "any text", "name of the job; the rendezvous refuses ranks of other jobs"
    )
    rank_process: str | None = _setting(
        "MULTIRING_RANK_PROCESS", str, None, "set by init", "tells child processes which process is the rank"
    )
    launched_in: str | None = _setting(
        "MULTIRING_LAUNCHED_IN", str, None, "set by multiring run", "shows whether a launcher is within the job"
    )
    reports: str | None = _setting(
        "MULTIRING_REPORTS", str, None, "set by multiring run", "socket for the ranks' reports to the launcher"
    )
    min_ranks: int | None = _setting(
        "MULTIRING_MIN_RANKS",
        values.between(1, 1 << 31),
        None,
        "set by multiring run --min-ranks",
        "the ranks go on without lost ones, as long as so many are left",
    )
    intake: int | None = _setting(
        "MULTIRING_INTAKE",
        values.between(0, 1 << 31),
        None,
        "set by multiring run --max-ranks",
        "the number of this process in a job that lets newcomers in; a newcomer's is not below MULTIRING_SIZE",
    )
    record: bool = _setting(
        "MULTIRING_RECORD",
        values.boolean,
        False,
        "set by multiring run --record",
        "1: this rank reports its steps to the launcher, about once a second (docs/live.md)",
    )
    engine: str = _setting(
        "MULTIRING_ENGINE",
        values.engine,
        "auto",
        "auto, shm, tcp or mpi",
        "what carries bytes between hosts. auto: sockets. mpi: MPI. shm: nothing, several hosts are an error. tcp: "
        "sockets, with every rank as a host of its own (for tests)",
    )
    interface: str | None = _setting(
        "MULTIRING_INTERFACE", str, None, "an interface name or an address", "interface on which the tcp engine listens"
    )
    topology: str | None = _setting(
        "MULTIRING_TOPOLOGY", str, None, "a path", "topology file; the same on all ranks (docs/topology.md)"
    )
    plan: str | None = _setting(
        "MULTIRING_PLAN", str, None, "a path", "file of pinned plans; the same on all ranks (docs/plan.md)"
    )
    replan: bool = _setting(
        "MULTIRING_REPLAN",
        values.boolean,
        True,
        "0 or 1",
        "1 plans again if operations take longer than predicted; 0 measures nothing. The same on all ranks "
        "(docs/plan.md)",
    )
    rails: tuple[Rail, ...] | None = _setting(
        "MULTIRING_RAILS",
        values.rails,
        None,
        "interface names or addresses, each once, separated by commas; each may end with :rate, "
        "like rail0:1gbit,rail1:250mbit",
        "interfaces that carry bytes between hosts. Default: MULTIRING_INTERFACE, else the interfaces of the topology "
        "file, else the interface of the default route",
    )
    rail_timeout_s: float = _setting(
        "MULTIRING_RAIL_TIMEOUT_S",
        values.positive,
        2.0,
        values.SECONDS,
        "a rail without any reply for this long is given up if another rail works",
    )
    connections: int | None = _setting("MULTIRING_CONNECTIONS", values.connections, None, *values.CONNECTIONS)
    wire_timeout_s: float = _setting(
        "MULTIRING_WIRE_TIMEOUT_S",
        values.wire_timeout,
        60.0,
        f"seconds >= 3; {NEVER_S:.0f} and more mean never",
        "PeerLostError is raised for a host that sends nothing for this long, not even its kernel's replies. A slow "
        "host, or one whose ranks compute, replies",
    )
    seal: bool = _setting(
        "MULTIRING_SEAL", values.boolean, False, "0 or 1", "1 encrypts what hosts send each other (docs/failures.md)"
    )
    seal_library: str | None = _setting(
        "MULTIRING_SEAL_LIBRARY", str, None, "a path", "libcrypto for MULTIRING_SEAL; default: the system's"
    )
    ports: tuple[int, int] | None = _setting(
        "MULTIRING_PORTS", values.port_range, None, "FIRST-LAST, 0 to 65535", "ports on which the tcp engine may listen"
    )
    init_timeout_s: float = _setting(
        "MULTIRING_INIT_TIMEOUT_S",
        values.positive,
        300.0,
        values.SECONDS,
        "how long init may take until all ranks have met",
    )
    stall_warn_s: float = _setting(
        "MULTIRING_STALL_WARN_S",
        values.positive,
        60.0,
        values.SECONDS,
        "a warning names a peer that has been silent for this long",
    )
    stall_timeout_s: float = _setting(
        "MULTIRING_STALL_TIMEOUT_S",
        values.positive,
        1800.0,
        values.SECONDS,
        "StallError is raised for a peer that has been silent for this long",
    )
    segment_bytes: int = _setting(
        "MULTIRING_SEGMENT_BYTES",
        values.between(values.LEAST_SEGMENT, values.MOST_SEGMENT),
        1 << 36,
        f"bytes, {values.LEAST_SEGMENT} to {values.MOST_SEGMENT}",
        "address space of one rank's shared memory; a page takes memory only once it is written",
    )
    device_path: str = _setting(
        "MULTIRING_DEVICE_PATH", values.device_path, "auto", values.DEVICE_PATH, "how CUDA tensors travel (docs/gpu.md)"
    )
    lower: bool = _setting(
        "MULTIRING_LOWER",
        values.boolean,
        True,
        "0 or 1",
        "0 runs every schedule move by move, without fused kernels (for tests)",
    )
    read_peers: bool = _setting(
        "MULTIRING_READ_PEERS",
        values.boolean,
        True,
        "0 or 1",
        "1 lets ranks of a host read each other's ordinary memory if the kernel allows it; 0 always copies it through "
        "shared memory",
    )
    log_moves: bool = _setting(
        "MULTIRING_LOG_MOVES", values.boolean, False, "0 or 1", "1 records every executed move (for tests)"
    )
    dynamic_process_sets: bool = _setting(
        "MULTIRING_DYNAMIC_PROCESS_SETS",
        values.boolean,
        False,
        "0 or 1",
        "1 allows programs with Horovod's interface to add and remove process sets after init; the same on all ranks",
    )
    timeline: str | None = _setting(
        "MULTIRING_TIMELINE",
        values.timeline,
        None,
        "a path, or DYNAMIC",
        "timeline file, recorded from init to shutdown (docs/timeline.md); rank 0's value is used. DYNAMIC: record "
        "nothing until start_timeline is called, as without the variable",
    )
    timeline_mark_cycles: bool = _setting(
        "MULTIRING_TIMELINE_MARK_CYCLES",
        values.boolean,
        False,
        "0 or 1",
        "1 marks in the timeline where an operation begins while no other is in flight",
    )
    timeline_preview: bool = _setting(
        "MULTIRING_TIMELINE_PREVIEW",
        values.boolean,
        False,
        "0 or 1",
        "1 writes the timeline from the beginning, with rank 0's events so far",
    )
    check_first_steps: bool = _setting(
        "MULTIRING_CHECK_FIRST_STEPS",
        values.boolean,
        True,
        "0 or 1",
        "1 compares ranks' gradients at an optimizer's first step, and their parameters before the second step "
        "(docs/mistakes.md)",
    )
    bench_peers: str | None = _setting(
        "MULTIRING_BENCH_PEERS",
        str,
        None,
        "a path",
        "folder of the libraries that the bench compares with; default: peers in multiring's cache folder",
    )

    data_cache: str | None = _setting(
        "MULTIRING_DATA_CACHE",
        str,
        None,
        "a path",
        "folder of this host's data cache (docs/data.md); default: data in multiring's cache folder",
    )
    data_memory: int = _setting(
        "MULTIRING_DATA_MEMORY",
        values.natural,
        128 << 20,
        f"bytes, an integer, 0 to {values.MOST_BYTES}",
        "memory in which a process keeps blocks of data sets, in addition to the data cache's folder",
    )
    data_share: bool = _setting(
        "MULTIRING_DATA_SHARE",
        values.boolean,
        False,
        "0 or 1",
        "1 lets hosts of a job share blocks of cached data sets during a training (docs/data.md)",
    )

    def changed(self, **values: Any) -> "Settings":
        """Return a copy with some settings changed, given by field name.

        Raises:
            ArgumentError: a setting does not exist, or its value is invalid.
        """
        known = {f.name: f for f in fields(self)}
        parsed: dict[str, Any] = {}
        for name, value in values.items():
            if name not in known:
                raise ArgumentError(f"unknown setting {name}={value!r}{nearest(name, known)}")
            parsed[name] = None if value is None else _parsed(known[name], name, text_of(value))
        return replace(self, **parsed)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None, *, horovod: bool = False) -> "Settings":
        """Return the settings in `environment` (default: this process's environment).

        With `horovod`, Horovod's variables are read, too; MULTIRING_ variables override them.

        Raises:
            ArgumentError: a variable's value cannot be parsed, or a MULTIRING_ variable is unknown.
        """
        source = _with_what_was_withheld() if environment is None else environment
        known = {f.metadata["name"]: f for f in fields(cls)}
        values: dict[str, Any] = _from_horovod(source) if horovod else {}
        for name, text in source.items():
            if not name.startswith(_PREFIX):
                continue
            if name not in known:
                raise ArgumentError(f"unknown setting {name}={text!r}{nearest(name, known)}")
            setting = known[name]
            values[setting.name] = _parsed(setting, name, text)
        return cls(**values)


_SECRET = "MULTIRING_SECRET"  # noqa: S105 -- a variable's name
_SECRET_FILE = "MULTIRING_SECRET_FILE"  # noqa: S105 -- a variable's name
_withheld: dict[str, str] = {}  # the secret that `withhold_secret` has removed from the environment


def withhold_secret() -> None:
    """Remove the job's secret from this process's environment.

    Child processes then do not inherit it. `Settings.from_environment` still returns the secret for the next `init`,
    unless the environment then has another.
    """
    secret = os.environ.pop(_SECRET, None)
    if secret is not None:
        _withheld[_SECRET] = secret


def become_rank(variables: Mapping[str, str]) -> None:
    """Set the variables of a rank in this process, which a cluster's framework has started."""
    os.environ.update(variables)


def leave_mark(text: str) -> None:
    """Set MULTIRING_RANK_PROCESS for processes that this process starts from now on."""
    os.environ.update(environment_of(rank_process=text))


def inherited_mark() -> str | None:
    """Return the current value of MULTIRING_RANK_PROCESS; None if it is not set."""
    return os.environ.get("MULTIRING_RANK_PROCESS")


def _with_what_was_withheld() -> Mapping[str, str]:
    if _SECRET in os.environ or _SECRET_FILE in os.environ:
        return os.environ
    return {**_withheld, **os.environ}


def _parsed(setting: "Field[Any]", name: str, text: str) -> Any:
    try:
        return setting.metadata["parse"](text)
    except (ValueError, KeyError):
        shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
        raise ArgumentError(f"{name}={shown!r}: want {setting.metadata['wanted']}") from None


def environment_of(**values: object) -> dict[str, str]:
    """Return the variables from which `Settings.from_environment` reads `values`.

    `values` are given by field name.
    """
    names = {f.name: f.metadata["name"] for f in fields(Settings)}
    return {names[field_name]: text_of(value) for field_name, value in values.items()}


def foreign_environment(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the `FOREIGN_VARIABLES` that `environment` sets.

    Empty values are left out. The default is this process's environment.
    """
    source = os.environ if environment is None else environment
    return {name: source[name] for name in FOREIGN_VARIABLES if source.get(name)}


_PLACES = ("TORCHELASTIC_", "MPI_LOCAL", "PMI_", "PMIX_RANK", "OMPI_", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID")


def places_told(environment: Mapping[str, str]) -> str:
    """Return other launchers' variables that no ordinary program sets, as text.

    The text has the form NAME=VALUE, separated by semicolons.
    """
    said = {name: text for name, text in environment.items() if name in FOREIGN_VARIABLES and name.startswith(_PLACES)}
    return ";".join(f"{name}={text}" for name, text in said.items())


def cache_folder(environment: Mapping[str, str] | None = None) -> Path:
    """Return multiring's folder in the user's cache folder.

    Source: XDG Base Directory Specification 0.8: $XDG_CACHE_HOME if it is an absolute path, else $HOME/.cache.
    """
    source = os.environ if environment is None else environment
    chosen = Path(source.get("XDG_CACHE_HOME", ""))
    return (chosen if chosen.is_absolute() else Path.home() / ".cache") / "multiring"


def inherited_environment() -> dict[str, str]:
    """Return a copy of this process's environment.

    A launcher passes it to the ranks that it starts.
    """
    return dict(os.environ)


# The variables in which Horovod's launcher gives a rank its numbers. multiring sets them for programs that read them,
# and never reads them itself.
HOROVOD_PLACE = MappingProxyType(
    {
        "rank": "HOROVOD_RANK",
        "size": "HOROVOD_SIZE",
        "local_rank": "HOROVOD_LOCAL_RANK",
        "local_size": "HOROVOD_LOCAL_SIZE",
        "cross_rank": "HOROVOD_CROSS_RANK",
        "cross_size": "HOROVOD_CROSS_SIZE",
        "hostname": "HOROVOD_HOSTNAME",
    }
)
# The rank's numbers in torchrun's variables, for torch.distributed's `env://`.
TORCH_PLACE = MappingProxyType(
    {
        "rank": "RANK",
        "size": "WORLD_SIZE",
        "local_rank": "LOCAL_RANK",
        "local_size": "LOCAL_WORLD_SIZE",
        "address": "MASTER_ADDR",
        "port": "MASTER_PORT",
    }
)


class JobNews(Enum):
    """The messages of rank 0 to the launcher about all ranks, as datagrams."""

    MET = b"1"  # all ranks have joined
    PROGRESS = b"2"  # the ranks have finished a step together, or saved


# The messages of each rank to the launcher: this process is the rank, or the rank has lost another rank.
RANK_JOINS, RANK_LOST = b"J%d", b"L%d %d"
RANK_STEPS = b"S"  # and a report on its steps follows


def roll_address(reports: str) -> str:
    """Return the address of the abstract socket at which the launcher receives ranks' messages.

    Args:
        reports: the value of MULTIRING_REPORTS, "@name".
    """
    return f"\0{reports[1:]}-met"


def vote_address(reports: str) -> str:
    """Return the address of the abstract socket at which the launcher takes part in votes; see `roll_address`."""
    return f"\0{reports[1:]}-vote"


def intake_address(reports: str) -> str:
    """Return the address of the abstract socket at which the launcher lets newcomers in; see `roll_address`."""
    return f"\0{reports[1:]}-intake"


_Values = dict[str, Any]


def _stall_check(text: str) -> _Values:
    return {"stall_warn_s": NEVER_S, "stall_timeout_s": NEVER_S} if values.boolean(text) else {}


def _seconds(setting: str) -> Callable[[str], _Values]:
    return lambda text: {setting: values.positive(text)}


def _seconds_or_never(setting: str) -> Callable[[str], _Values]:
    return lambda text: {setting: min(values.natural(text) or NEVER_S, NEVER_S)}


# The settings that Horovod's variables set, for `Settings.from_environment(horovod=True)`. If several variables set one
# setting, the last variable applies.
_HOROVOD: Mapping[str, tuple[Callable[[str], _Values], str]] = MappingProxyType(
    {
        "HOROVOD_DYNAMIC_PROCESS_SETS": (lambda text: {"dynamic_process_sets": values.boolean(text)}, "0 or 1"),
        "HOROVOD_GLOO_IFACE": (lambda text: {"interface": text}, "an interface name"),
        "HOROVOD_GLOO_TIMEOUT_SECONDS": (_seconds("init_timeout_s"), "seconds > 0"),
        "HOROVOD_STALL_CHECK_TIME_SECONDS": (_seconds("stall_warn_s"), "seconds > 0"),
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": (_seconds_or_never("stall_timeout_s"), "whole seconds, 0 for never"),
        "HOROVOD_STALL_CHECK_DISABLE": (_stall_check, "0 or 1"),
        # Horovod's timeline file grows while the job runs.
        "HOROVOD_TIMELINE": (lambda text: {"timeline": text, "timeline_preview": True}, "a path, or DYNAMIC"),
        "HOROVOD_TIMELINE_MARK_CYCLES": (lambda text: {"timeline_mark_cycles": values.boolean(text)}, "0 or 1"),
    }
)
HOROVOD_READ = tuple(_HOROVOD)


def _from_horovod(source: Mapping[str, str]) -> _Values:
    """Return the settings of Horovod's variables in `source`, by field name.

    An empty variable counts as not set, as in Horovod.
    """
    values: _Values = {}
    for name, (parse, wanted) in _HOROVOD.items():
        text = source.get(name)
        if not text:
            continue
        try:
            values |= parse(text)
        except (ValueError, KeyError):
            raise ArgumentError(f"{name}={text!r}: want {wanted}") from None
    return values
