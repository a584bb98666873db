"""One rank of a part of `multiring verify gpu`: python gpu.py PART RESULT PYTHON..."""

import functools
import importlib
import json
import os
import platform
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed
from torch import Tensor, nn

import multiring
import multiring.torch as mt
import multiring_torch
from multiring._runtime.engines.nccl import NcclEngine
from multiring._schedule import WIRES
from multiring._verify.behaviours import nccl_calls
from multiring._verify.behaviours.calls import stream
from multiring._verify.behaviours.table import BEHAVIOURS, VARYING, recorded, results_here
from multiring.errors import MultiringError

dist: Any = torch.distributed  # typed Any, because torch's stubs are incomplete
_STEPS = 20
_ROWS = 8  # of a rank and a step
_RUNS = 30
_SEED = 7


class RankClaims:
    """The checks and figures of this rank. Rank 0 writes those of all ranks."""

    def __init__(self) -> None:
        self.checks: list[dict[str, Any]] = []
        self.figures: dict[str, Any] = {}

    def check(self, claim: str, holds: bool, found: object = "") -> None:  # noqa: FBT001 -- a value
        """Add a claim, whether it holds here, and what was found."""
        self.checks.append({"claim": claim, "holds": bool(holds), "found": str(found)})

    @contextmanager
    def refused(self, claim: str, *words: str) -> Iterator[None]:
        """Check that the block raises an error whose text has all `words`."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 -- any error is a result
            text = f"{type(error).__name__}: {error}"
            self.check(claim, all(each in text for each in words), text[:300])
        else:
            self.check(claim, holds=False, found="no error")

    def over_ranks(self) -> dict[str, Any]:
        """Return the report of all ranks: a claim holds if it holds on each of them."""
        every = mt.allgather_object(self.checks)
        checks = []
        for same in zip(*every, strict=True):
            wrong = [f"rank {rank}: {each['found']}" for rank, each in enumerate(same) if not each["holds"]]
            checks.append({**same[0], "holds": not wrong, "found": "; ".join(wrong) or same[0]["found"]})
        return {"checks": checks, "figures": self.figures}


def versions(report: RankClaims, device: torch.device) -> None:
    """Tell the libraries and the devices."""
    properties = torch.cuda.get_device_properties(device)
    library: Any = torch.cuda.nccl
    report.figures |= {
        "GPU": f"{properties.name}, {properties.total_memory >> 20} MiB, compute capability "
        f"{properties.major}.{properties.minor}",
        "GPUs": torch.cuda.device_count(),
        "torch": torch.__version__,
        "CUDA of torch": torch.version.cuda,
        "NCCL of torch": ".".join(map(str, library.version())) if dist.is_nccl_available() else "none",
        "Python": platform.python_version(),
        "NumPy": np.__version__,
        "kernel": platform.release(),
        "CPUs": len(os.sched_getaffinity(0)),
    }
    report.check("CUDA answers", torch.ones(2, device=device).sum().item() == 2)


def behaviours(report: RankClaims, _device: torch.device) -> None:
    """Repeat the recorded experiments, each in a process of its own."""
    record = recorded()
    found = results_here(BEHAVIOURS, python=sys.argv[3:])
    for name, expected in record.items():
        if name in VARYING:
            report.figures[name] = found[name]
            continue
        is_same = found[name] == expected
        report.check(name, is_same, "" if is_same else f"here {found[name]!r}, on the H100 {expected!r}")


def _draws() -> np.random.Generator:
    return np.random.default_rng(_SEED)


def collectives(report: RankClaims, device: torch.device) -> None:
    """Compare collectives of random sizes and types with the sums of all ranks' values on the host."""
    size, rank = mt.size(), mt.rank()
    draws = _draws()
    wrong = dict.fromkeys(("allreduce", "in place", "allgather", "broadcast", "reducescatter", "alltoall", "min"), 0)
    for _ in range(_RUNS):
        dtype = [torch.float32, torch.float64, torch.int32, torch.int64][draws.integers(4)]
        count = int(draws.integers(1, 1 << int(draws.integers(2, 18))))
        values = [torch.from_numpy(draws.integers(-50, 50, count * size)).to(dtype) for _ in range(size)]
        own = values[rank].to(device)
        total = torch.stack(values).sum(0).to(dtype)
        found = mt.allreduce(own, op=mt.Sum)
        wrong["allreduce"] += not torch.equal(found.cpu(), total)
        handle = mt.allreduce_async_(changed := own.clone(), op=mt.Sum)
        torch.randn(count, device=device)
        mt.synchronize(handle)
        wrong["in place"] += not torch.equal((changed + 1).cpu(), total + 1)
        rows = own[: count + rank]  # every rank has another number of rows
        parts = [each[: count + number] for number, each in enumerate(values)]
        wrong["allgather"] += not torch.equal(mt.allgather(rows).cpu(), torch.cat(parts))
        wrong["broadcast"] += not torch.equal(mt.broadcast(own, size - 1).cpu(), values[-1])
        part = mt.reducescatter(own, op=mt.Sum)
        wrong["reducescatter"] += not torch.equal(part.cpu(), total[rank * count : (rank + 1) * count])
        exchanged = mt.alltoall(own)
        pieces = torch.cat([each[rank * count : (rank + 1) * count] for each in values])
        wrong["alltoall"] += not torch.equal(
            (exchanged[0] if isinstance(exchanged, tuple) else exchanged).cpu(), pieces
        )
        wrong["min"] += not torch.equal(mt.allreduce(own, op=mt.Min).cpu(), torch.stack(values).amin(0))
    for name, count in wrong.items():
        report.check(f"{name}: {_RUNS} random tensors have the values of the host", count == 0, f"{count} wrong")


def backend(report: RankClaims, device: torch.device) -> None:
    """Train with DDP on the backend, beside one process."""
    mt.shutdown()
    multiring_torch.register()
    dist.init_process_group("multiring")
    size, rank = dist.get_world_size(), dist.get_rank()
    work = dist.all_reduce(total := torch.full((1 << 20,), float(rank), device=device), async_op=True)
    work.wait()
    report.check("all_reduce", bool((total == sum(range(size))).all().item()))
    whole = torch.empty(size, device=device)
    dist.all_gather_single(whole, torch.full((1,), float(rank), device=device)) if hasattr(
        dist, "all_gather_single"
    ) else dist.all_gather_into_tensor(whole, torch.full((1,), float(rank), device=device))
    report.check("all_gather", whole.tolist() == list(range(size)))
    for name, make in _MODELS.items():
        far = _distance(make, device, lambda model: nn.parallel.DistributedDataParallel(model, device_ids=[device]))
        report.check(f"DDP of a {name}: the losses of one process to 1e-4", far < 1e-4, f"{far:.1e}")
    dist.destroy_process_group()
    mt.init()


def _perceptron() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


class _Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.Linear(4 * 36, 10)

    def forward(self, images: Tensor) -> Tensor:
        found: Tensor = self.last(self.norm(self.first(images)).relu().flatten(1))
        return found


_MODELS: dict[str, Callable[[], nn.Module]] = {"perceptron": _perceptron, "convolution": _Convolution}


def _distance(
    make: Callable[[], nn.Module],
    device: torch.device,
    wrap: Callable[[nn.Module], nn.Module] = lambda model: model,
    optimizer_of: Callable[[nn.Module, Any], Any] = lambda _, optimizer: optimizer,
) -> float:
    """Return the largest relative difference of a loss of all ranks from that of one process, over the steps."""
    size, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (mt.size(), mt.rank())
    draws = torch.Generator().manual_seed(_SEED)
    images = torch.randn(_STEPS, size * _ROWS, 1, 8, 8, generator=draws)
    labels = torch.randint(10, (_STEPS, size * _ROWS), generator=draws)

    def train(rows: slice, *, alone: bool) -> list[float]:
        torch.manual_seed(_SEED)
        model = make().to(device)
        network = model if alone else wrap(model)
        plain = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
        optimizer = plain if alone else optimizer_of(network, plain)
        losses = []
        for step in range(_STEPS):
            optimizer.zero_grad()
            loss: Any = nn.functional.cross_entropy(
                network(images[step, rows].to(device)), labels[step, rows].to(device)
            )
            loss.backward()
            optimizer.step()
            losses.append(loss.detach().double())
        return [each.item() for each in losses]

    own = torch.tensor(train(slice(rank * _ROWS, (rank + 1) * _ROWS), alone=False), dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(own)
        own /= size
    else:
        own = mt.allreduce(own)
    expected = torch.tensor(train(slice(None), alone=True), dtype=torch.float64)
    return float(((own - expected).abs() / expected.abs()).max())


def _shared(network: nn.Module, optimizer: Any, **options: Any) -> Any:
    mt.broadcast_parameters(network.state_dict(), root_rank=0)
    return mt.DistributedOptimizer(optimizer, network.named_parameters(), **options)


def training(report: RankClaims, device: torch.device) -> None:
    """Train with DistributedOptimizer beside one process, and count synchronisations of a step."""
    for name, make in _MODELS.items():
        far = _distance(make, device, optimizer_of=_shared)
        report.check(f"DistributedOptimizer, {name}: the losses of one process to 1e-4", far < 1e-4, f"{far:.1e}")
    model = _perceptron().to(device)
    optimizer = _shared(model, torch.optim.SGD(model.parameters(), lr=0.05))
    images = torch.randn(_ROWS, 1, 8, 8, device=device)
    for _ in range(3):
        _step(model, optimizer, images)
    torch.cuda.set_sync_debug_mode("error")
    try:
        _step(model, optimizer, images)
        report.check("a step does not synchronise the caller with the device", holds=True)
    except RuntimeError as error:
        report.check("a step does not synchronise the caller with the device", holds=False, found=error)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def wire(report: RankClaims, device: torch.device) -> None:
    """Train with gradients that are rounded between the ranks, beside one process, whose gradients are not."""
    for compression in WIRES:
        rounded = functools.partial(_shared, compression=compression)
        far = _distance(_perceptron, device, optimizer_of=rounded)
        # A difference below 1e-6 says that nothing was rounded.
        report.check(f"{compression}: 1e-6 to 1e-1 from the losses of one process", 1e-6 < far < 1e-1, f"{far:.1e}")


def _step(model: nn.Module, optimizer: Any, images: Tensor) -> None:
    optimizer.zero_grad()
    model(images).square().mean().backward()
    optimizer.step()


def caller(report: RankClaims, device: torch.device) -> None:
    """Measure the host's time of calls and the rates of collectives."""
    small = torch.ones(256, device=device)
    calls, whole = [], []
    for _ in range(200):
        began_s = time.perf_counter()
        handle = mt.allreduce_async_(small, name="small", op=mt.Sum)
        calls.append(time.perf_counter() - began_s)
        mt.synchronize(handle)
        torch.cuda.synchronize()
        whole.append(time.perf_counter() - began_s)
        small.fill_(1)
    report.figures["1 KiB allreduce_async_, host time of the call"] = f"{median(calls) * 1e6:.1f} us"
    report.figures["1 KiB allreduce_, until the device has the result"] = f"{median(whole) * 1e6:.1f} us"
    for size_mib in (1, 16, 64):
        large = torch.ones(size_mib << 18, device=device)
        times = []
        for _ in range(8):
            torch.cuda.synchronize()
            mt.barrier()
            began_s = time.perf_counter()
            mt.allreduce_(large, op=mt.Average)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - began_s)
        rate = large.nbytes / median(times[2:]) / 1e9
        report.figures[f"{size_mib} MiB allreduce_, {mt.size()} ranks"] = f"{rate:.2f} GB/s of tensor"
        report.check(f"{size_mib} MiB has the average", bool((large == 1).all().item()))
    before = torch.cuda.memory_stats(device)["num_alloc_retries"]
    report.check("no allocation was tried twice", before == 0, before)


def refusals(report: RankClaims, device: torch.device) -> None:
    """Make calls that must be refused."""
    rank = mt.rank()
    with report.refused("shapes that differ", "shape"):
        mt.allreduce(torch.ones(3 + rank, device=device), name="shapes")
    with report.refused("a device on one rank, the host on the other", "cuda"):
        mt.allreduce(torch.ones(3, device=device if rank else "cpu"), name="devices")
    graph = torch.cuda.CUDAGraph()
    with report.refused("a call while the stream is captured", "captur"), torch.cuda.graph(graph):
        mt.allreduce(torch.ones(3, device=device), name="captured")
    torch.cuda.synchronize()
    report.check("the ranks go on", mt.allreduce(torch.ones(3, device=device), op=mt.Sum).sum().item() == 3 * mt.size())
    _free, most = torch.cuda.mem_get_info(device)
    with report.refused("more memory than the device has", "memory"):
        torch.empty(2 * most, dtype=torch.uint8, device=device)
    report.check("the ranks go on after it", mt.allreduce(torch.ones(1, device=device), op=mt.Sum).item() == mt.size())
    child = os.fork()
    if child == 0:
        try:
            mt.allreduce(torch.ones(1))
        except (MultiringError, ValueError, RuntimeError):
            os._exit(0)
        os._exit(1)
    _, status = os.waitpid(child, 0)
    report.check("a call after a fork raises", os.waitstatus_to_exitcode(status) == 0)


def death(report: RankClaims, device: torch.device) -> None:
    """Kill the last rank; the others must raise within five seconds, and go on."""
    tensor = torch.ones(1 << 20, device=device)
    mt.allreduce_(tensor)
    last = mt.size() - 1
    if mt.rank() == last:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher asks the other ranks to end
    began_s = time.monotonic()
    with report.refused("the error names the rank that was killed", f"rank {last}"):
        mt.allreduce_(tensor)
    seconds = time.monotonic() - began_s
    report.check("it comes within 5 s", seconds < 5.5, f"{seconds:.1f} s")
    report.check("the device still works", torch.ones(3, device=device).sum().item() == 3)


def nccl(report: RankClaims, device: torch.device) -> None:
    """Compare collectives of the engine nccl with the host's, and measure a small one."""
    mt.shutdown()
    group = multiring.init()
    engine = NcclEngine.open(group, device.index)
    there: Any = group.on_engine(engine)
    size, rank, draws, wrong = group.size, group.rank, _draws(), 0
    for _ in range(_RUNS):
        count = int(draws.integers(1, 1 << int(draws.integers(2, 18))))
        values = [draws.integers(-50, 50, count).astype(np.float32) for _ in range(size)]
        array = there.allocate(count, "float32").put(values[rank])
        there.all_reduce(array)
        wrong += not np.array_equal(array.get(), sum(values))
    report.check(f"all_reduce: {_RUNS} random arrays have the values of the host", wrong == 0, f"{wrong} wrong")
    small, calls = there.allocate(256, "float32").put(1.0), []
    for _ in range(200):
        began_s = time.perf_counter()
        handle = there.all_reduce_async(small, "max")
        calls.append(time.perf_counter() - began_s)
        handle.wait()
    report.figures["1 KiB all_reduce_async, host time of the call"] = f"{median(calls) * 1e6:.1f} us"
    if size == 1:
        report.figures["1 KiB, NCCL called directly"] = f"{median(_direct_calls()) * 1e6:.1f} us"
    _cupy(report, there)
    multiring.shutdown()
    mt.init()


def _direct_calls() -> list[float]:
    """Return the host's time of calls of NCCL itself, over one rank, in seconds."""
    found = []
    library, communicator, on = nccl_calls.library(), nccl_calls.alone(), stream()
    x, y = (torch.ones(256, device="cuda") for _ in range(2))
    source, target, sum_, float32 = x.data_ptr(), y.data_ptr(), nccl_calls.SUM, nccl_calls.FLOAT32
    for _ in range(200):
        began_s = time.perf_counter()
        library.ncclAllReduce(source, target, 256, float32, sum_, communicator, on)
        found.append(time.perf_counter() - began_s)
        torch.cuda.synchronize()
    return found


def _cupy(report: RankClaims, there: Any) -> None:
    """Reduce an array of CuPy that its stream writes late, if CuPy is there."""
    try:
        cupy: Any = importlib.import_module("cupy")
    except ImportError:
        report.figures["CuPy"] = "not installed"
        return
    report.figures["CuPy"] = cupy.__version__
    wrong = 0
    for _ in range(_RUNS):
        with cupy.cuda.Stream(non_blocking=True) as side:
            array = cupy.sort(cupy.random.random(1 << 16))[::-1].copy()
            array[:] = cupy.sort(array) * 0 + there.rank + 1
            handle = there.all_reduce_async(array)
            handle.order(side.ptr)
            wrong += bool((array * 2 != there.size * (there.size + 1)).any())
    report.check(
        f"{_RUNS} arrays of CuPy on a stream of its own, without a wait of the host", wrong == 0, f"{wrong} wrong"
    )


def gpus(report: RankClaims, device: torch.device) -> None:
    """Repeat the comparison of collectives with one GPU for each rank."""
    used = mt.allgather_object(device.index)
    report.check("each rank has a GPU of its own", len(set(used)) == len(used), used)
    collectives(report, device)


_PARTS: dict[str, Callable[[RankClaims, torch.device], None]] = {
    each.__name__: each
    for each in (versions, behaviours, collectives, backend, training, wire, caller, refusals, death, nccl, gpus)
}


def main() -> None:
    """Run a part on this rank."""
    name, target = sys.argv[1], Path(sys.argv[2])
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    mt.init()
    device = mt.local_device()
    torch.cuda.set_device(device)
    report = RankClaims()
    _PARTS[name](report, device)
    whole = {"checks": report.checks, "figures": report.figures} if name == "death" else report.over_ranks()
    if mt.rank() == 0:
        target.write_text(json.dumps(whole), encoding="utf-8")


if __name__ == "__main__":
    main()
