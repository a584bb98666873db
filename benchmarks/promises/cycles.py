"""Join and leave a job a hundred times; measure the cycles and what they leave.

    multiring run -n 2 -- python benchmarks/promises/cycles.py [--cycles 100] [--warm-up 20]

A cycle consists of init, operations of every kind with checked results, a step of a DistributedOptimizer, and shutdown.
A cycle's time is that of the slowest rank. The remains are the files, sockets, threads and memory that a process has
gained since the warm-up cycles, as the maximum over the ranks. Allocators and imports settle in the warm-up cycles. The
exit code is 1 if the median cycle takes longer than 50 ms, or if anything remains.
"""

import argparse
import ctypes
import gc
import statistics
import sys
import time
from pathlib import Path

import torch
from torch import nn

import multiring
import multiring.torch as mt

CYCLE_MS = 50.0  # the longest median cycle of two ranks that passes
MEMORY_BYTES = 2 << 20  # the memory growth that allocators may keep
_PROCESS = Path("/proc/self")
_LIBC = ctypes.CDLL(None)


def main() -> int:
    """Print the results; return 1 if a floor is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cycles", type=int, default=100)
    parser.add_argument("--warm-up", type=int, default=20, help="untimed cycles before the timed ones")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for _ in range(arguments.warm_up):
        cycle()
    before = holdings()
    taken_ms = [cycle() for _ in range(arguments.cycles)]
    after = holdings()

    mt.init()
    left = {what: most(after[what] - before[what]) for what in after}
    slowest_ms = [most(each) for each in taken_ms]
    median_ms = statistics.median(slowest_ms)
    missed = median_ms > CYCLE_MS or any(
        count > (MEMORY_BYTES if what == "memory" else 0) for what, count in left.items()
    )
    if mt.rank() == 0:
        print(f"{arguments.cycles} cycles of {mt.size()} ranks, after {arguments.warm_up} others")
        print(f"median {median_ms:.1f} ms, longest {max(slowest_ms):.1f} ms  (<= {CYCLE_MS:.0f} ms)")
        print(
            f"left behind: {left['files']:.0f} files, {left['sockets']:.0f} sockets, {left['threads']:.0f} threads, "
            f"{left['memory'] / 1024:.0f} KiB of memory"
        )
    mt.shutdown()
    return int(missed)


def cycle() -> float:
    """Join the job, run operations and leave; return the milliseconds of the cycle."""
    start = time.perf_counter()
    mt.init()
    operate()
    train()
    mt.shutdown()
    return (time.perf_counter() - start) * 1e3


def operate() -> None:
    """Run operations of every kind, small and large, named and unnamed; check them."""
    rank, size = mt.rank(), mt.size()
    total, mean = size * (size + 1) / 2, (size + 1) / 2
    handles = [mt.allreduce_async(torch.full((16,), rank + 1.0), name=f"tensor {number}") for number in range(4)]
    assert all(mt.synchronize(handle).tolist() == [mean] * 16 for handle in handles)
    large = mt.allreduce_(torch.full((1 << 18,), rank + 1.0), op=mt.Sum)
    assert bool((large == total).all())
    group = mt.shared_zeros_like([torch.empty(1000), torch.empty(50, 50)])
    for tensor in group:
        tensor.fill_(rank + 1.0)
    assert all(bool((tensor == mean).all()) for tensor in mt.grouped_allreduce_(group))
    assert mt.allgather(torch.full((rank + 1,), rank)).tolist() == [
        each for each in range(size) for _ in range(each + 1)
    ]
    assert mt.broadcast(torch.full((3,), rank), 0).tolist() == [0, 0, 0]
    received = mt.alltoall(torch.full((size,), rank))
    assert isinstance(received, torch.Tensor)
    assert received.tolist() == list(range(size))
    assert mt.reducescatter(torch.ones(2 * size), op=mt.Sum).tolist() == [float(size)] * 2
    assert mt.broadcast_object({"from": rank}) == {"from": 0}
    multiring.world().barrier()


def train() -> None:
    """Take a step of a small network with shared gradients, and check the gradients."""
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    optimizer = mt.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    model(torch.full((4, 64), mt.rank() + 1.0)).sum().backward()
    optimizer.step()
    assert model.weight.grad is not None
    assert bool((model.weight.grad == 4 * (mt.size() + 1) / 2).all())


def holdings() -> dict[str, float]:
    """Return the numbers of this process's files, sockets and threads, and its memory."""
    gc.collect()
    if hasattr(_LIBC, "malloc_trim"):  # With glibc, this returns the allocator's free memory to the system.
        _LIBC.malloc_trim(0)
    opened = [str(each.readlink()) for each in (_PROCESS / "fd").iterdir() if each.is_symlink()]
    sockets = sum(name.startswith("socket:") for name in opened)
    # Memory that is mapped for all ranks counts as well. Shared libraries do not count.
    rollup = (_PROCESS / "smaps_rollup").read_text(encoding="ascii").splitlines()
    kinds = ("Private_Dirty:", "Shared_Dirty:")
    return {
        "files": len(opened) - sockets,
        "sockets": sockets,
        "threads": len(list((_PROCESS / "task").iterdir())),
        "memory": 1024 * sum(int(line.split()[1]) for line in rollup if line.startswith(kinds)),
    }


def most(figure: float) -> float:
    """Return the largest figure of all ranks."""
    return float(mt.allreduce(torch.tensor(figure, dtype=torch.float64), op=mt.Max))


if __name__ == "__main__":
    sys.exit(main())
