"""What was read of each host and each pair of hosts. The rules compare these values; nothing here measures."""

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class RailReading:
    """One interface that a host uses between hosts.

    `mtu` is in bytes, None if the system does not tell it. `stated_bytes_per_s` is the bandwidth that the topology file
    or MULTIRING_RAILS states, None if neither states one.
    """

    interface: str
    address: str
    port: int = 0
    mtu: int | None = None
    stated_bytes_per_s: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class HostReading:
    """What was read on one host.

    - versions: of multiring, Python, numpy and torch, by name; an absent package has the text "none".
    - rails: the interfaces; empty if they cannot be determined, for the reason in `rails_fault`.
    - ranks: the number of the job's ranks on this host.
    - cores: the number of CPUs that the ranks may use together.
    - quota: the CPUs whose time the control group allows, None without a limit.
    - memory_bytes, shm_bytes: the free memory, and the free space of /dev/shm.
    - files: the most descriptors that a rank may open (the hard limit).
    - clock_s: the host's clock relative to rank 0's, with an error of at most `clock_error_s`.
    - work_s: CPU seconds of a fixed piece of work, the least of several.
    - throttled: the share of the time in which the control group stopped this process.
    - heat: how often the processor slowed down because of its temperature.
    - machine: the boot of the machine; virtual hosts may share one.
    - machine_cores: the number of CPUs of the machine.
    - others: the cores of the machine that other work used, None if it was not measured.
    - gpus: the models of the GPUs.
    - torch_cuda: the CUDA version of torch, "" for a build without CUDA, None without torch.
    - driver_cuda: the newest CUDA that the driver supports, "" without a driver.
    - nccl: the version of NCCL, or "" if there is none.
    """

    name: str
    machine: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    rails: tuple[RailReading, ...] = ()
    rails_fault: str = ""
    ranks: int = 1
    cores: int = 1
    quota: float | None = None
    machine_cores: int = 1
    memory_bytes: int | None = None
    shm_bytes: int | None = None
    files: int | None = None
    clock_s: float | None = None
    clock_error_s: float = 0.0
    work_s: float | None = None
    throttled: float = 0.0
    heat: int = 0
    others: float | None = None
    gpus: tuple[str, ...] = ()
    torch_cuda: str | None = None
    driver_cuda: str = ""
    nccl: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class PairReading:
    """What one host found when it connected to another on one rail.

    `source` and `target` are places in `Readings.hosts`. `refusal` says why there was no connection, and is "" if there
    was one. `bytes_per_s` is the best rate from source to target, None if it was not measured. `variation` is how far
    the median of several measurements is below the best one, as a share: busy cores, and not the link, vary.
    """

    source: int
    target: int
    rail: int = 0
    refusal: str = ""
    bytes_per_s: float | None = None
    variation: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Absence:
    """A rank or a host that did not answer, and why, as far as it is known."""

    who: str
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Needs:
    """What a host must have at least: free memory, free space of /dev/shm, in bytes; and descriptors for each rank."""

    memory_bytes: int = 1 << 30
    shm_bytes: int = 64 << 20
    files: int = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class Readings:
    """All readings of a job.

    - racks: the rack of each host, in the order of `hosts`; empty if none are known.
    - launcher_fault: why MPI does not fit the launcher, "" if it does or if there is no MPI.
    - unread: what could not be looked at, in sentences for the user.
    """

    hosts: tuple[HostReading, ...]
    pairs: tuple[PairReading, ...] = ()
    absent: tuple[Absence, ...] = ()
    racks: tuple[int, ...] = ()
    launcher_fault: str = ""
    unread: tuple[str, ...] = ()
