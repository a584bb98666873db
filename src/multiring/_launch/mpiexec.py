"""Detect which mpiexec is installed, and build its options for hosts.

Nothing in this module starts a rank.
"""

import subprocess
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path

from multiring.errors import ArgumentError, LaunchError, UnsupportedError

_VERSION_S = 30.0
_SLOTS = ("slots", "max_slots", "max-slots")


class Mpiexec(Enum):
    """The supported kinds of mpiexec. The value is the name in messages."""

    HYDRA = "Hydra (MPICH, Intel MPI)"
    OPEN_MPI = "Open MPI"


def version_of_mpiexec(environment: Mapping[str, str]) -> str:
    """Return the output of `mpiexec --version`.

    The mpiexec is on the PATH of `environment`.

    Raises:
        LaunchError: the command cannot be run, or does not end within 30 s.
    """
    try:
        done = subprocess.run(
            ["mpiexec", "--version"],  # noqa: S607 -- the mpiexec on PATH will also start the ranks
            env=dict(environment),
            capture_output=True,
            text=True,
            timeout=_VERSION_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"mpiexec --version fails: {error}") from None
    return done.stdout + done.stderr


def mpiexec_of(version: str) -> Mpiexec:
    """Return the kind of mpiexec that prints `version` for `--version`.

    Raises:
        UnsupportedError: the mpiexec is neither Hydra nor Open MPI.
    """
    if "HYDRA" in version or "Intel(R) MPI" in version:
        return Mpiexec.HYDRA
    if "Open MPI" in version or "OpenRTE" in version:
        return Mpiexec.OPEN_MPI
    first = version.strip().partition("\n")[0]
    raise UnsupportedError(f"mpiexec is neither Hydra (MPICH, Intel MPI) nor Open MPI; --version says {first!r}")


def parse_hosts(text: str) -> tuple[tuple[str, int], ...]:
    """Return (host, number of ranks) for each host in a text like `a:4,b:4`.

    A host without a number has one rank.

    Raises:
        ArgumentError: a part is not a host and a positive number, or a host occurs twice.
    """
    hosts: list[tuple[str, int]] = []
    for part in text.split(","):
        name, colon, count = part.strip().rpartition(":")
        if not colon:
            name, count = count, "1"
        is_count = count.isascii() and count.isdecimal() and int(count) > 0
        if not is_count or not name or name.startswith("-") or any(sign in name for sign in ":/ \t'\""):
            raise ArgumentError(f"--hosts {text!r}: {part!r} is not HOST:RANKS; want names and numbers, like a:4,b:4")
        if name in dict(hosts):
            raise ArgumentError(f"--hosts {text!r}: {name!r} is listed twice; list it once, with all its ranks")
        hosts.append((name, int(count)))
    return tuple(hosts)


def parse_hostfile(path: Path) -> str:
    """Read a hostfile and return its hosts as a text for `parse_hosts`.

    A line is `host`, `host:4` or `host slots=4`, as in the hostfiles of Horovod, Hydra and Open MPI. `#` begins a
    comment.

    Raises:
        ArgumentError: the file cannot be read, has no host, or has a line of another form.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"cannot read the hosts in {path}: {error}") from None
    hosts = []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        name, *others = words
        slots = [word.partition("=")[2] for word in others if word.partition("=")[0] in _SLOTS]
        if len(others) > 1 or len(slots) != len(others):
            raise ArgumentError(f"{path}, line {number}: {line.strip()!r} is not a host; want a line like: a slots=4")
        hosts.append(f"{name}:{slots[0]}" if slots else name)
    if not hosts:
        raise ArgumentError(f"{path} names no host; want lines like: a slots=4")
    return ",".join(hosts)


def first_places(hosts: Sequence[tuple[str, int]], ranks: int | None) -> tuple[tuple[str, int], ...]:
    """Return the hosts with only the first `ranks` places; None keeps all places.

    Raises:
        ArgumentError: `hosts` has fewer than `ranks` places.
    """
    total = sum(count for _, count in hosts)
    left = total if ranks is None else ranks
    if left > total:
        spelt = ",".join(f"{name}:{count}" for name, count in hosts)
        raise ArgumentError(f"{ranks} ranks, but {spelt} has places for {total}; want fewer ranks, or more hosts")
    taken = []
    for name, count in hosts:
        taken.append((name, min(count, left)))
        left -= taken[-1][1]
    return tuple(place for place in taken if place[1])


def placement(kind: Mpiexec, hosts: Sequence[tuple[str, int]]) -> list[str]:
    """Return mpiexec's options that place ranks on hosts.

    Each host gets its number of ranks, in the order of `hosts`.
    """
    places = ",".join(f"{name}:{count}" for name, count in hosts)
    ranks = str(sum(count for _, count in hosts))
    if kind is Mpiexec.HYDRA:
        return ["-hosts", places, "-n", ranks]
    # Open MPI binds each rank to one core by default, so all threads of a rank would share that core.
    return ["--host", places, "-n", ranks, "--bind-to", "none"]
