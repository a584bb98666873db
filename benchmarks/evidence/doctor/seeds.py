"""Draw healthy labs, and one fault for each kind of finding: its place, its severity, and what must be named."""

import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from tests.standin.build import BASE, built, nvml_built

from multiring._bench.install import installed
from multiring._settings import inherited_environment

MBIT = 10**6
PORTS = (41000, 41199)
CORES = os.cpu_count() or 1
MIB = 1 << 20
NEED_MEMORY, NEED_SHM, NEED_FILES = 4096 * MIB, 256 * MIB, 1024
LIBRARY = {"mpich": "libmpi.so.12", "openmpi": "libmpi.so.40"}


@dataclass(kw_only=True, slots=True)
class Shape:
    """A lab: hosts, the rate of each rail in bits per second, racks, ranks of each host."""

    hosts: int
    rails: tuple[int, ...] = (100 * MBIT,)
    racks: int = 1
    slots: tuple[int, ...] = ()

    def words(self) -> list[str]:
        """Return the options of `multiring lab`."""
        words = ["--hosts", str(self.hosts), "--link", f"{self.rails[0]}bit"]
        words += [word for rate in self.rails[1:] for word in ("--rail", f"{rate}bit")]
        words += ["--slots", ",".join(map(str, self.slots))] if self.slots else []
        return words + (["--rack", str(self.racks), "--uplink", f"{self.rails[0]}bit"] if self.racks > 1 else [])


@dataclass(kw_only=True, slots=True)
class Trial:
    """One run: a lab with faults, and the kind and the hosts that must be named, or nothing."""

    kind: str
    is_ill: bool
    shape: Shape
    severity: str = ""
    faults: list[dict[str, Any]] = field(default_factory=list)
    timed: list[str] = field(default_factory=list)  # faults of the lab itself
    where: tuple[str, ...] = ()
    variables: dict[str, str] = field(default_factory=dict)
    mpi: tuple[str, str] | None = None  # the MPI that starts the ranks, and the one that they load; then no lab


# Ten shapes for healthy runs.
SHAPES = (
    Shape(hosts=2),
    Shape(hosts=3, rails=(50 * MBIT,)),
    Shape(hosts=4),
    Shape(hosts=4, rails=(100 * MBIT, 50 * MBIT)),
    Shape(hosts=4, racks=2),
    Shape(hosts=5, rails=(80 * MBIT,)),
    Shape(hosts=6, rails=(60 * MBIT,)),
    Shape(hosts=6, rails=(60 * MBIT,), racks=2),
    Shape(hosts=3, slots=(1, 2, 1)),
    Shape(hosts=3, rails=(60 * MBIT, 60 * MBIT, 30 * MBIT)),
)


def name(host: int) -> str:
    """Return the name of a host of the lab."""
    return f"host{host}"


def address(host: int, rail: int = 0) -> str:
    """Return the address of a host of the lab on a rail."""
    return f"10.77.{rail}.{host + 1}"


class Draw:
    """Draws of one trial: a shape, a host, another host, a rail, and the severity of the fault."""

    def __init__(self, kind: str, number: int, seed: int) -> None:
        self.random = random.Random(f"{seed} {kind} {number}")  # noqa: S311 -- the same trials in every run
        self.kind = kind
        self.is_ill = bool(number % 2) != (KINDS.index(kind) % 2 == 0)
        rails = self.random.choice([(100 * MBIT,), (60 * MBIT,), (80 * MBIT, 40 * MBIT)])
        self.shape = Shape(hosts=self.random.randint(3, 5), rails=rails)
        self.host, self.other = self.random.sample(range(self.shape.hosts), 2)
        self.rail = self.random.randrange(len(rails))

    def with_rails(self, rails: int) -> "Draw":
        """Return this draw on a lab with so many rails."""
        self.shape.rails = (80 * MBIT, 60 * MBIT)[:rails]
        self.rail = self.random.randrange(rails)
        return self

    def between(self, ill: tuple[float, float], healthy: tuple[float, float]) -> float:
        """Return a severity from one of two ranges."""
        return self.random.uniform(*(ill if self.is_ill else healthy))

    def share(self) -> float:
        """Return a share of the median."""
        return self.between((0.3, 0.77), (0.83, 0.95))

    def trial(self, severity: object, *faults: dict[str, Any], where: tuple[int, ...] = (), **values: Any) -> Trial:
        """Return the trial; faults without a host are of `self.host`."""
        placed = [{"host": name(self.host), **each} for each in faults]
        named = tuple(name(each) for each in sorted(where or (self.host,)))
        values = {"where": named, **values}
        return Trial(
            kind=self.kind, is_ill=self.is_ill, shape=self.shape, severity=str(severity), faults=placed, **values
        )


def version(draw: Draw) -> Trial:
    """Draw: another version of a package on one host."""
    package = draw.random.choice(["multiring", "Python", "numpy", "torch"])
    value = f"0.0.{draw.random.randint(1, 9)}"
    return draw.trial(f"{package} {value}", *([{"do": "version", "package": package, "value": value}] * draw.is_ill))


def mtu(draw: Draw) -> Trial:
    """Draw: another MTU."""
    value = draw.random.randint(900, 1499) if draw.is_ill else 1500
    return draw.trial(value, {"do": "mtu", "interface": f"rail{draw.rail}", "value": value})


def wrong_interface(draw: Draw) -> Trial:
    """Draw: an interface that is absent, loopback or down."""
    if draw.random.random() < 0.5:
        draw = draw.with_rails(1)
        value = draw.random.choice(["lo", "absent0"]) if draw.is_ill else "rail0"
        return draw.trial(value, {"do": "variable", "name": "MULTIRING_INTERFACE", "value": value})
    draw = draw.with_rails(2)
    return draw.trial("rail1 down", *([{"do": "down", "interface": "rail1"}] * draw.is_ill))


def slow_interface(draw: Draw) -> Trial:
    """Draw: an interface below the median."""
    share = draw.share()
    rate = int(share * draw.shape.rails[draw.rail])
    if draw.random.random() < 0.5:
        timed = [f"slow {name(draw.host)} {rate}bit rail{draw.rail}"]
        return draw.trial(f"{share:.2f} both ways", timed=timed)
    return draw.trial(f"{share:.2f} sends", {"do": "rate", "interface": f"rail{draw.rail}", "value": rate})


def slow_host(draw: Draw) -> Trial:
    """Draw: a host that computes slowly, or whose rails are all slow."""
    share = draw.share()
    if draw.random.random() < 0.5:
        return draw.trial(f"{share:.2f} computes", {"do": "slow_work", "value": 1 / share})
    draw = draw.with_rails(2)
    timed = [f"slow {name(draw.host)} {int(share * rate)}bit rail{at}" for at, rate in enumerate(draw.shape.rails)]
    return draw.trial(f"{share:.2f} both rails", timed=timed)


def slow_link(draw: Draw) -> Trial:
    """Draw: a slow link between two hosts, in one direction."""
    share, full = draw.share(), draw.shape.rails[draw.rail]
    place = {"do": "link", "interface": f"rail{draw.rail}", "address": address(draw.other, draw.rail)}
    fault: dict[str, Any] = {**place, "full": full, "value": int(share * full)}
    return draw.trial(f"{share:.2f}", fault, where=(draw.host, draw.other))


def slow_rail(draw: Draw) -> Trial:
    """Draw: a rail that is slow on all hosts."""
    share = draw.share()
    rate = int(share * draw.shape.rails[draw.rail])
    timed = [f"slow {name(host)} {rate}bit rail{draw.rail}" for host in range(draw.shape.hosts)]
    trial = draw.trial(f"{share:.2f}", timed=timed)
    trial.where = ("all hosts",)
    return trial


def firewall(draw: Draw) -> Trial:
    """Draw: packets between two hosts are dropped."""
    variables = {"MULTIRING_PORTS": f"{PORTS[0]}-{PORTS[1]}"}
    if draw.random.random() < 0.5:
        to = address(draw.other, draw.rail) if draw.is_ill else address(200, draw.rail)
        fault = {"do": "no_route", "address": to}
    else:
        # Replies come to ports from 32768 on, so a filter of these would be an obstacle, too.
        ports = f"{PORTS[0]}:{PORTS[1]}" if draw.is_ill else "1:20000"
        fault = {"do": "firewall", "address": address(draw.other, draw.rail), "ports": ports}
    return draw.trial(fault["do"], fault, where=(draw.host, draw.other), variables=variables)


def clock(draw: Draw) -> Trial:
    """Draw: a clock that is fast or slow."""
    skew_s = draw.between((0.055, 1.0), (0.0, 0.045)) * draw.random.choice([-1, 1])
    return draw.trial(f"{skew_s * 1e3:.0f} ms", {"do": "clock", "value": skew_s})


def memory(draw: Draw) -> Trial:
    """Draw: little memory."""
    value = int(draw.between((0.6, 0.98), (1.02, 2.0)) * NEED_MEMORY)
    return draw.trial(f"{value // MIB} MiB", {"do": "memory", "value": value})


def shm(draw: Draw) -> Trial:
    """Draw: a small /dev/shm."""
    value = int(draw.between((0.2, 0.98), (1.02, 2.0)) * NEED_SHM)
    return draw.trial(f"{value // MIB} MiB", {"do": "shm", "value": value})


def files(draw: Draw) -> Trial:
    """Draw: few descriptors."""
    value = int(draw.between((0.4, 0.99), (1.0, 1.5)) * NEED_FILES)
    return draw.trial(value, {"do": "files", "value": value})


def oversubscribed(draw: Draw) -> Trial:
    """Draw: more ranks than CPUs."""
    count = CORES + 1 if draw.is_ill else CORES
    draw.shape.slots = tuple(count if host == draw.host else 1 for host in range(draw.shape.hosts))
    return draw.trial(f"{count} ranks")


def throttled(draw: Draw) -> Trial:
    """Draw: a control group that stops the ranks."""
    share = draw.between((0.06, 0.6), (0.0, 0.04))
    return draw.trial(f"{share:.0%}", {"do": "throttled", "value": share})


def mpi(draw: Draw) -> Trial:
    """Draw: an MPI that another MPI's mpiexec has started."""
    starts = draw.random.choice(["mpich", "openmpi"])
    loads = starts if not draw.is_ill else {"mpich": "openmpi", "openmpi": "mpich"}[starts]
    trial = draw.trial(f"{starts} starts, {loads} is loaded", mpi=(starts, loads))
    trial.where = ("all ranks",)
    return trial


@cache
def libraries() -> list[str]:
    """Return the stand-ins of the driver's libraries and of NCCL."""
    return [str(built() / BASE), str(built() / "libcuda.so.1"), str(built() / "libnccl.so.2"), str(nvml_built())]


def _devices(draw: Draw, changed: dict[str, str], torch_cuda: str, what: str) -> Trial:
    usual = {"STANDIN_DEVICES": "2", "STANDIN_KINDS": "H100", "STANDIN_DRIVER": "12080", "STANDIN_NCCL": "22703"}
    faults = []
    for host in range(draw.shape.hosts):
        is_odd = host == draw.host
        settings = usual | (changed if is_odd else {})
        place = {"host": name(host), "do": "devices", "settings": settings, "libraries": libraries()}
        faults.append({**place, "torch_cuda": torch_cuda if is_odd else "12.8"})
    return draw.trial(what, *faults)


def gpu(draw: Draw) -> Trial:
    """Draw: GPUs, a driver or a torch that do not fit."""
    what = draw.random.choice(["count", "model", "driver", "build"])
    if not draw.is_ill:
        return _devices(draw, {"STANDIN_DRIVER": "12020"}, "12.8", f"{what}: an older driver of the same CUDA")
    changed = {"count": {"STANDIN_DEVICES": "1"}, "model": {"STANDIN_KINDS": "H100,A100"}}
    changed |= {"driver": {"STANDIN_DRIVER": "11080"}, "build": {}}
    return _devices(draw, changed[what], "" if what == "build" else "12.8", what)


def nccl(draw: Draw) -> Trial:
    """Draw: another version of NCCL."""
    number = draw.random.randint(22000, 22702) if draw.is_ill else 22703
    return _devices(draw, {"STANDIN_NCCL": str(number)}, "12.8", str(number))


def silent(draw: Draw) -> Trial:
    """Draw: a host that does not come."""
    draw.host = draw.random.randrange(1, draw.shape.hosts)
    seconds = 61 if draw.is_ill else draw.random.uniform(0, 3)
    trial = draw.trial(f"{seconds:.0f} s", {"do": "late", "value": seconds})
    trial.where = (f"rank {draw.host}",)
    return trial


SEEDS: tuple[Callable[[Draw], Trial], ...] = (
    *(version, mtu, wrong_interface, slow_interface, slow_host, slow_link, slow_rail, firewall, clock, memory, shm),
    *(files, oversubscribed, throttled, mpi, gpu, nccl, silent),
)
KINDS = [each.__name__.replace("_", "-") for each in SEEDS]


def trial_of(kind: str, number: int, seed: int) -> Trial:
    """Return one trial. Half of a seed's trials are just on the healthy side."""
    return SEEDS[KINDS.index(kind)](Draw(kind, number, seed))


def mpi_start(trial: Trial) -> tuple[list[str], dict[str, str]]:
    """Return the command before the doctor's, and the variables, of a trial of `mpi`."""
    assert trial.mpi is not None
    starts, loads = trial.mpi
    home = installed(starts)
    prefix = [str(home / "bin" / "mpiexec"), "-n", "2"]
    variables = {"MPI4PY_LIBMPI": str(installed(loads) / "lib" / LIBRARY[loads])}
    if starts == "openmpi":
        prefix.append("--oversubscribe")
        variables |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OPAL_PREFIX": str(home)}
    return prefix, inherited_environment() | variables
