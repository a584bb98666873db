"""The rules: what is wrong, from the readings of all hosts. Nothing here measures or waits."""

from collections import Counter
from collections.abc import Callable, Iterator
from statistics import median

from multiring._diagnosis.findings import FindingKind, HealthFinding, odd_ones
from multiring._diagnosis.link_rules import BUSY, is_busy, link_findings, unusable_rails
from multiring._diagnosis.readings import HostReading, Needs, Readings

SLOW = 0.8  # a share of the median; a slower host or link is a finding
CLOCK_S = 0.05  # a clock that differs by more than this from the median clock is a finding
_THROTTLED = 0.05  # a share of the time


def findings_of(readings: Readings, needs: Needs) -> list[HealthFinding]:
    """Return what is wrong, the findings that explain others first.

    Args:
        readings: the readings of all hosts.
        needs: what a host must have at least.
    """
    found: list[HealthFinding] = []
    if readings.launcher_fault:
        found.append(
            HealthFinding(
                kind=FindingKind.MPI,
                where="all ranks",
                found=readings.launcher_fault,
                todo="start the ranks with the mpiexec of the MPI that mpi4py loads, or name the launcher's libmpi.so "
                "in MPI4PY_LIBMPI",
            )
        )
    found += [
        HealthFinding(
            kind=FindingKind.SILENT,
            where=each.who,
            found=each.why,
            todo="check that the host runs, and that the ports of MULTIRING_PORTS are open between it and rank 0",
            is_certain=False,
        )
        for each in readings.absent
    ]
    found += _versions(readings.hosts)
    found += _mtus(readings.hosts, unusable_rails(readings))
    for rule in (_devices, _needs(needs), _cores, _clocks, _work):
        found += rule(readings.hosts)
    found += link_findings(readings)
    return found


Rule = Callable[[tuple[HostReading, ...]], Iterator[HealthFinding]]


def _versions(hosts: tuple[HostReading, ...]) -> Iterator[HealthFinding]:
    for package in dict.fromkeys(name for host in hosts for name in host.versions):
        where, told = odd_ones({host.name: host.versions.get(package, "none") for host in hosts})
        if where:
            yield HealthFinding(
                kind=FindingKind.VERSION,
                where=where,
                found=f"{package} is {told}",
                todo=f"install the same version of {package} on all hosts",
            )


def _mtus(hosts: tuple[HostReading, ...], unusable: set[tuple[int, int]]) -> Iterator[HealthFinding]:
    """Compare the MTUs of each rail, without those of wrong interfaces (host, rail), which are findings themselves."""
    for rail in range(max((len(host.rails) for host in hosts), default=0)):
        named = {
            host.name: host.rails[rail]
            for at, host in enumerate(hosts)
            if rail < len(host.rails) and (at, rail) not in unusable
        }
        where, told = odd_ones({name: str(each.mtu) for name, each in named.items() if each.mtu is not None})
        if where:
            name = next(iter(named.values())).interface
            yield HealthFinding(
                kind=FindingKind.MTU,
                where=where,
                found=f"the MTU of {name} is {told}, in bytes",
                todo=f"set the same MTU on all hosts and on their switch: ip link set dev {name} mtu BYTES",
            )


def _devices(hosts: tuple[HostReading, ...]) -> Iterator[HealthFinding]:
    where, told = odd_ones({host.name: _gpus_text(host.gpus) for host in hosts})
    if where:
        yield HealthFinding(
            kind=FindingKind.GPU,
            where=where,
            found=f"the GPUs differ: {told}",
            todo="run nvidia-smi on the hosts: it does not list a GPU that has failed; see CUDA_VISIBLE_DEVICES, too",
        )
    for host in hosts:
        if host.gpus and host.torch_cuda is not None:
            yield from _torch_findings(host)
    with_nccl = {host.name: host.nccl for host in hosts if host.gpus and host.torch_cuda and host.nccl}
    where, told = odd_ones(with_nccl)
    if where:
        yield HealthFinding(
            kind=FindingKind.NCCL,
            where=where,
            found=f"NCCL is {told}",
            todo="install the same torch, which brings its NCCL, on all hosts",
        )


def _torch_findings(host: HostReading) -> Iterator[HealthFinding]:
    if not host.torch_cuda:
        yield HealthFinding(
            kind=FindingKind.GPU,
            where=host.name,
            found=f"the host has {_gpus_text(host.gpus)}, but torch is a build without CUDA",
            todo="install torch's CUDA build (https://pytorch.org)",
        )
    elif _major(host.driver_cuda) < _major(host.torch_cuda):
        yield HealthFinding(
            kind=FindingKind.GPU,
            where=host.name,
            found=f"torch is built for CUDA {host.torch_cuda}, but the driver serves CUDA {host.driver_cuda or 'none'}",
            todo="update NVIDIA's driver, or install torch for the driver's CUDA",
        )
    elif not host.nccl:
        yield HealthFinding(
            kind=FindingKind.NCCL,
            where=host.name,
            found="torch has CUDA, but no usable NCCL was found",
            todo="reinstall torch's CUDA build, which brings its NCCL",
        )


def _gpus_text(gpus: tuple[str, ...]) -> str:
    counts = Counter(gpus)
    return " and ".join(f"{count} x {kind}" for kind, count in sorted(counts.items())) or "no GPU"


def _major(version: str) -> int:
    text = version.partition(".")[0]
    return int(text) if text.isdecimal() else 0


def _needs(needs: Needs) -> Rule:
    def rule(hosts: tuple[HostReading, ...]) -> Iterator[HealthFinding]:
        for host in hosts:
            if host.memory_bytes is not None and host.memory_bytes < needs.memory_bytes:
                yield HealthFinding(
                    kind=FindingKind.MEMORY,
                    where=host.name,
                    found=f"{_mib(host.memory_bytes)} of memory is free: want {_mib(needs.memory_bytes)}",
                    todo="end other programs, or raise the limit of the container or of ulimit -v",
                )
            if host.shm_bytes is not None and host.shm_bytes < needs.shm_bytes:
                yield HealthFinding(
                    kind=FindingKind.SHARED_MEMORY,
                    where=host.name,
                    found=f"{_mib(host.shm_bytes)} is free in /dev/shm, which PyTorch's data loaders use: "
                    f"want {_mib(needs.shm_bytes)}",
                    todo="enlarge it (docker run --shm-size; mount -o remount,size=), or remove what fills it",
                )
            if host.files is not None and host.files < needs.files:
                yield HealthFinding(
                    kind=FindingKind.FILES,
                    where=host.name,
                    found=f"a process may open {host.files} descriptors: want {needs.files}",
                    todo="raise the hard limit: ulimit -Hn, or nofile in /etc/security/limits.conf",
                )

    return rule


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 20):.1f} MiB"


def _cores(hosts: tuple[HostReading, ...]) -> Iterator[HealthFinding]:
    for host in hosts:
        usable = float(host.cores) if host.quota is None else min(host.cores, host.quota)
        if host.ranks > usable:
            limit = "" if host.quota is None or host.quota >= host.cores else " of its control group"
            yield HealthFinding(
                kind=FindingKind.OVERSUBSCRIBED,
                where=host.name,
                found=f"{host.ranks} ranks share {usable:g} CPUs{limit}",
                todo="start at most one rank for each CPU, or give the job more CPUs",
            )
        if host.throttled > _THROTTLED or host.heat:
            why = (
                f"the control group stopped the ranks for {host.throttled:.0%} of the time"
                if host.throttled > _THROTTLED
                else f"the processor slowed down {host.heat} times because of its temperature"
            )
            yield HealthFinding(
                kind=FindingKind.THROTTLED,
                where=host.name,
                found=why,
                todo="raise the CPU limit of the container"
                if host.throttled > _THROTTLED
                else "check the host's cooling",
            )
    yield from _busy(hosts)


def _busy(hosts: tuple[HostReading, ...]) -> Iterator[HealthFinding]:
    """Name each machine whose cores other work used. Virtual hosts of one machine are named together."""
    for machine in dict.fromkeys(host.machine for host in hosts):
        on_it = [host for host in hosts if host.machine == machine]
        others = [host.others for host in on_it if host.others is not None]
        cores = on_it[0].machine_cores
        if others and median(others) > BUSY * cores:
            yield HealthFinding(
                kind=FindingKind.BUSY,
                where=", ".join(host.name for host in on_it),
                found=f"other programs used {median(others):.1f} of {cores} CPUs meanwhile",
                todo="end them, or expect slower steps; see them with top",
            )


def _clocks(hosts: tuple[HostReading, ...]) -> Iterator[HealthFinding]:
    read = [(host, host.clock_s) for host in hosts if host.clock_s is not None]
    todo = "run a time service, such as chrony, on all hosts"
    if len(read) == 2:  # neither clock is the usual one
        (one, first_s), (other, second_s) = read
        skew_s, error_s = abs(first_s - second_s), max(one.clock_error_s, other.clock_error_s)
        if skew_s >= CLOCK_S:
            yield HealthFinding(
                kind=FindingKind.CLOCK,
                where=f"{one.name}, {other.name}",
                found=f"the clocks differ by {skew_s * 1e3:.0f} ms",
                todo=todo,
                is_certain=skew_s - error_s >= CLOCK_S,
            )
        return
    usual_s = median(clock_s for _, clock_s in read) if read else 0.0
    for host, clock_s in read:
        skew_s = clock_s - usual_s
        if abs(skew_s) >= CLOCK_S:
            yield HealthFinding(
                kind=FindingKind.CLOCK,
                where=host.name,
                found=f"the clock is {abs(skew_s) * 1e3:.0f} ms {'fast' if skew_s > 0 else 'slow'}",
                todo=todo,
                is_certain=abs(skew_s) - host.clock_error_s >= CLOCK_S,
            )


def _work(hosts: tuple[HostReading, ...]) -> Iterator[HealthFinding]:
    # Other programs take caches and clock speed, which CPU time does not show. Then only `busy` is certain.
    timed = [host for host in hosts if host.work_s and not is_busy(host)]
    if len(timed) < 2:
        return
    # The lower middle: of two hosts, the faster one.
    usual_s = sorted(host.work_s or 0.0 for host in timed)[(len(timed) - 1) // 2]
    for host in timed:
        share = usual_s / (host.work_s or usual_s)
        if share < SLOW:
            yield HealthFinding(
                kind=FindingKind.SLOW_HOST,
                where=host.name,
                found=f"it computes at {share:.0%} of the median host's speed",
                todo="compare the processors, their power settings and their temperatures (lscpu, cpupower)",
                is_certain=False,
            )
