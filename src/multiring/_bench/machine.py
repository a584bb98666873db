"""Describe the machine of the measurements, and measure the other work on it."""

import os
import platform
import resource
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from multiring._version import VERSION

QUIET_CORES = 0.05  # if other work takes more of one core, figures are not publishable
_GIT_S = 10.0
_BUSY_COLUMNS = (0, 1, 2, 7)  # user, nice, system, steal; no interrupts, because they may be for the bench's packets
_TURNS = 2000


def hardware() -> str:
    """Return one line on this machine: its processor, this process's cores, last-level cache, memory and kernel."""
    cores = len(os.sched_getaffinity(0))
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    parts = [
        _processor(),
        f"{cores} cores",
        _last_level_cache(),
        f"{memory_gib:.0f} GiB",
        f"Linux {platform.release()}",
    ]
    return ", ".join(part for part in parts if part)


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return f"{value.strip()} ({platform.machine()}{matrix_unit(lines)})"
    return platform.machine()


def matrix_unit(lines: list[str]) -> str:
    """Return ", AMX" or ", no AMX" for an x86 processor, from the lines of /proc/cpuinfo, else "".

    Processors of one model name differ in this matrix unit.
    """
    flags = next((line.partition(":")[2].split() for line in lines if line.partition(":")[0].strip() == "flags"), None)
    if flags is None:
        return ""
    return ", AMX" if any(flag.startswith("amx") for flag in flags) else ", no AMX"


def _last_level_cache() -> str:
    sizes = sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/level"))
    if not sizes:
        return ""
    last = max(sizes, key=lambda path: int(path.read_text(encoding="ascii")))
    size = (last.parent / "size").read_text(encoding="ascii").strip()
    return f"L{last.read_text(encoding='ascii').strip()} {size}"


def commit() -> str:
    """Return the commit of this package, with "-dirty" if files differ.

    Outside a git repository, return the package's version.
    """
    here = Path(__file__).parent
    tracked = _git(here, "ls-files", "--error-unmatch", Path(__file__).name)
    described = _git(here, "describe", "--always", "--dirty", "--abbrev=12") if tracked else None
    return described or f"multiring {VERSION}"


def _git(folder: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(  # noqa: S603 -- our own words
            ["git", "-C", str(folder), *words],  # noqa: S607 -- the user's git
            capture_output=True,
            text=True,
            timeout=_GIT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def ping_pong_us(turns: int = _TURNS) -> float:
    """Return the microseconds of one round trip over two pipes between two processes, a measure of the machine."""
    echo_program = [sys.executable, "-I", "-S", "-c", "import os\nwhile byte := os.read(0, 1): os.write(1, byte)"]
    with subprocess.Popen(echo_program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as echo:  # noqa: S603 -- ours
        there, back = echo.stdin, echo.stdout
        if there is None or back is None:
            raise AssertionError("internal error: stdin and stdout have to be pipes")
        there.write(b"x")
        back.read(1)  # wait until the other process runs
        start = time.perf_counter()
        for _ in range(turns):
            there.write(b"x")
            back.read(1)
        return (time.perf_counter() - start) / turns * 1e6


@dataclass(frozen=True, slots=True)
class _Reading:
    at_s: float
    busy_s: float  # of all processes of the machine, and stolen by the hypervisor
    own_s: float  # of this process and its descendants that have ended


class OtherWorkMeter:
    """A meter of the processor time of other processes than this one and its children.

    It starts when it is created.

    A child counts only after its end was awaited, so read the meter while no child runs.
    """

    def __init__(self) -> None:
        self._start = _read()

    def cores(self) -> float:
        """Return how many cores other work took on average so far.

        0.05 is 5 % of one core.
        """
        now = _read()
        other_s = (now.busy_s - self._start.busy_s) - (now.own_s - self._start.own_s)
        return max(other_s, 0.0) / max(now.at_s - self._start.at_s, 1e-9)

    def is_quiet(self) -> bool:
        """Return whether figures that were taken since the meter's creation may be published."""
        return self.cores() <= QUIET_CORES


def _read() -> _Reading:
    own = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    columns = Path("/proc/stat").read_text(encoding="ascii").partition("\n")[0].split()[1:]
    ticks = sum(int(columns[column]) for column in _BUSY_COLUMNS if column < len(columns))
    return _Reading(
        time.monotonic(),
        ticks / os.sysconf("SC_CLK_TCK"),
        sum(usage.ru_utime + usage.ru_stime for usage in own),
    )
