"""All-reduce on one host: multiring's arena and ordinary buffers beside Gloo, alternating in one run.

Every case is verified before it is timed. Libraries alternate as child jobs, so that what else the machine
does falls on all of them; ratios are taken within one alternation, and their median is printed with its range.

    python benchmarks/one_host.py [--ranks 2] [--size-mib 64] [--alternations 7] [--calls 30]

A library's name as first argument is how this script starts one rank of a child job.
"""

import argparse
import json
import os
import platform
import secrets
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from multiring.settings import environment_of, inherited_environment

LIBRARIES = ("arena", "ordinary", "gloo")
FLOORS = {"arena": 3.0, "ordinary": 1.5}
QUIET = 0.05  # of all cores


def time_calls(call: Callable[[], None], barrier: Callable[[], None], calls: int) -> list[float]:
    """Return the seconds of each of `calls` calls, after a warm-up."""
    for _ in range(3):
        call()
    barrier()
    times = []
    for _ in range(calls):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return times


def run_multiring(*, arena: bool, count: int, calls: int) -> list[float]:
    """One rank of a multiring job."""
    import multiring  # noqa: PLC0415 -- a child loads only the library it times

    group = multiring.init()
    buffer = group.allocate(count, "float32") if arena else np.empty(count, np.float32)
    source = np.arange(count, dtype=np.float32) % 1024 + group.rank
    buffer[:] = source
    group.all_reduce(buffer)
    want = (np.arange(count, dtype=np.float32) % 1024) * group.size + group.size * (group.size - 1) / 2
    if not np.array_equal(buffer, want):
        raise SystemExit("multiring: wrong sums")
    buffer[:] = 0
    times = time_calls(lambda: group.all_reduce(buffer), group.barrier, calls)
    multiring.shutdown()
    return times


def run_gloo(*, count: int, calls: int) -> list[float]:
    """One rank of a torch.distributed job on Gloo; it meets at MASTER_ADDR and MASTER_PORT."""
    import torch  # noqa: PLC0415 -- as above
    import torch.distributed as dist  # noqa: PLC0415

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    buffer = (torch.arange(count, dtype=torch.float32) % 1024) + dist.get_rank()
    dist.all_reduce(buffer)
    size = dist.get_world_size()
    want = (torch.arange(count, dtype=torch.float32) % 1024) * size + size * (size - 1) / 2
    if not torch.equal(buffer, want):
        raise SystemExit("gloo: wrong sums")
    buffer.zero_()
    times = time_calls(lambda: dist.all_reduce(buffer), dist.barrier, calls)
    dist.destroy_process_group()
    return times


def child(library: str, count: int, calls: int) -> None:
    """Run one rank and print its times as JSON."""
    if library == "gloo":
        times = run_gloo(count=count, calls=calls)
    else:
        times = run_multiring(arena=library == "arena", count=count, calls=calls)
    print(json.dumps(times))


def job(library: str, ranks: int, count: int, calls: int, port: int) -> float:
    """Run one child job; return the median seconds of an all-reduce, the slowest rank's."""
    cores = sorted(os.sched_getaffinity(0))
    secret, meeting = secrets.token_hex(16), f"@bench-{secrets.token_hex(8)}"
    processes = []
    for rank in range(ranks):
        environment = inherited_environment() | {"OMP_NUM_THREADS": "1"}
        if library == "gloo":
            environment |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
            environment["MASTER_PORT"] = str(port)
        else:
            environment |= environment_of(rank=rank, size=ranks, rendezvous=meeting, secret=secret)
        core = cores[rank % len(cores)]
        options = ["--count", str(count), "--calls", str(calls), "--core", str(core)]
        command = [sys.executable, __file__, library, *options]
        processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE))  # noqa: S603 -- this very file
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit(f"{library}: exit codes {[process.returncode for process in processes]}")
    return float(max(statistics.median(json.loads(output)) for output in outputs))


def ping_pong_us(turns: int = 5000) -> float:
    """Return the microseconds of one round trip over two pipes between two processes: the machine's own pace."""
    there, back = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        for _ in range(turns):
            os.write(back[1], os.read(there[0], 1))
        os._exit(0)
    start = time.perf_counter()
    for _ in range(turns):
        os.write(there[1], b"x")
        os.read(back[0], 1)
    took = time.perf_counter() - start
    os.waitpid(pid, 0)
    return took / turns * 1e6


def busy_share(seconds: float = 1.0) -> float:
    """Return what share of all cores was busy with other work over `seconds`."""

    def busy() -> tuple[int, int]:
        fields = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
        return sum(fields) - fields[3] - fields[4], sum(fields)

    before, all_before = busy()
    time.sleep(seconds)
    after, all_after = busy()
    return (after - before) / max(all_after - all_before, 1)


def main() -> int:
    """Print the table; exit 1 where a floor is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("library", nargs="?", choices=LIBRARIES)
    parser.add_argument("--count", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--core", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--size-mib", type=float, default=64)
    parser.add_argument("--alternations", type=int, default=7)
    parser.add_argument("--calls", type=int, default=30)
    args = parser.parse_args()
    if args.library:
        os.sched_setaffinity(0, {args.core})
        child(args.library, args.count, args.calls)
        return 0

    size_bytes = int(args.size_mib * 2**20)
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"],  # noqa: S607 -- whichever git is there
        capture_output=True,
        text=True,
        check=False,
    )
    busy = busy_share()
    print(f"command: {' '.join(['python', *sys.argv])}")
    print(
        f"commit {commit.stdout.strip()}, {time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores, {platform.machine()}, ",
        end="",
    )
    print(f"Linux {platform.release()}, pipe ping-pong {ping_pong_us():.1f} us, other work {busy:.1%} of the cores")
    if busy > QUIET:
        print(f"other work takes more than {QUIET:.0%}: not for publication")
    print(f"all_reduce, {args.ranks} ranks, {args.size_mib:g} MiB float32, one core a rank")
    seconds: dict[str, list[float]] = {library: [] for library in LIBRARIES}
    for turn in range(args.alternations):
        for library in LIBRARIES:
            took = job(library, args.ranks, size_bytes // 4, args.calls, 29500 + turn)
            seconds[library].append(took)
    missed = False
    for library in LIBRARIES:
        median = statistics.median(seconds[library])
        line = f"{library:<10} {median * 1e3:8.2f} ms  {size_bytes / median / 1e9:6.2f} GB/s"
        if library in FLOORS:
            ratios = sorted(gloo / ours for gloo, ours in zip(seconds["gloo"], seconds[library], strict=True))
            ratio = statistics.median(ratios)
            missed |= ratio < FLOORS[library]
            line += f"  {ratio:5.2f} x Gloo (range {ratios[0]:.2f} to {ratios[-1]:.2f}, floor {FLOORS[library]:g})"
        print(line)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
