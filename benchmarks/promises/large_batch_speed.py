"""Measure the cost of the parts of a large-batch step.

    OMP_NUM_THREADS=1 multiring run -n 2 -- python benchmarks/promises/large_batch_speed.py muon
    OMP_NUM_THREADS=1 multiring run -n 2 -- python benchmarks/promises/large_batch_speed.py shampoo --rounds 30
    OMP_NUM_THREADS=1 multiring run -n 1 -- python benchmarks/promises/large_batch_speed.py shampoo-step --rounds 5
    OMP_NUM_THREADS=1 multiring run -n 2 -- python benchmarks/promises/large_batch_speed.py noise
    OMP_NUM_THREADS=1 multiring run -n 2 -- python benchmarks/promises/large_batch_speed.py precision --rounds 40

Run this on a quiet machine, on two ranks with one thread each.

muon       One Muon update of ResNet-50's filters, by both ranks together relative to one rank alone.
           The aim is at most 0.6.
shampoo    CPU seconds of a rank in ten Shampoo updates of a transformer, which refresh the bases once: of both ranks
           together relative to one rank alone. The floor is 1 / 1.6.
shampoo-step  Ten training steps of a transformer on one rank with Shampoo, relative to AdamW, in alternating tens.
           The floor is 1.35.
noise      The share of a step that measuring the noise scale takes, timed by itself.
           The aim is at most 0.3 %, the floor 1 %.
precision  Steps of ResNet-50 in bf16 with mixed_precision, relative to plain torch.autocast, in alternating steps.
           The floor is a median of at least 0.99, or an interval that reaches 1. It also prints the share of peak.
"""

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import multiring.torch as mt
from multiring._bench.statistics import ratio_interval
from multiring._bench.workers.step_models import resnet50
from multiring.convergence.noise_scale import NoiseSample, NoiseScale
from multiring.torch.step.gradients import norms_of

IMAGES, PIXELS = 4, 224


def samples() -> tuple[Tensor, Tensor]:
    """Return random images of shape (4, 3, 224, 224) in channels_last, and classes."""
    torch.manual_seed(mt.rank())
    images = torch.randn(IMAGES, 3, PIXELS, PIXELS).to(memory_format=torch.channels_last)
    return images, torch.randint(1000, (IMAGES,))


def model() -> nn.Module:
    """Return a ResNet-50 in channels_last."""
    torch.manual_seed(0)
    made = resnet50()
    made.to(memory_format=torch.channels_last)  # type: ignore[call-overload] # torch's own stub lacks it
    return made


def transformer() -> nn.Module:
    """Return a transformer of 3.4 million parameters."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(256, 8, 1024, 0.0, batch_first=True)
    return nn.Sequential(nn.Embedding(512, 256), nn.TransformerEncoder(layer, 4), nn.Linear(256, 512))


def timed(work: Callable[[], object]) -> float:
    """Return the seconds that `work` takes, starting when all ranks are ready."""
    mt.barrier()
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def muon(rounds: int) -> None:
    """Time a Muon update by both ranks together and by each rank alone."""
    sets = [mt.add_process_set([0]), mt.add_process_set([1])]
    alone = sets[mt.rank()]
    optimizers = []
    for process_set in (mt.global_process_set, alone):
        filters = [each for each in model().parameters() if each.dim() >= 2]
        for number, each in enumerate(filters):
            each.grad = torch.randn(each.shape, generator=torch.Generator().manual_seed(number))
        optimizers.append(mt.Muon(filters, process_set=process_set))
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds + 1):
        for own, optimizer in zip(times, optimizers, strict=True):
            own.append(timed(optimizer.step))
    show("muon, two ranks / one", times[0][1:], times[1][1:])


def shampoo(rounds: int) -> None:
    """Measure the CPU time of Shampoo updates by both ranks together and by each rank alone."""
    sets = [mt.add_process_set([0]), mt.add_process_set([1])]
    optimizers = []
    for process_set in (mt.global_process_set, sets[mt.rank()]):
        parameters = list(transformer().parameters())
        for number, each in enumerate(parameters):
            each.grad = torch.randn(each.shape, generator=torch.Generator().manual_seed(number))
        optimizers.append(mt.Shampoo(parameters, process_set=process_set))
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds + 2):
        for own, optimizer in zip(times, optimizers, strict=True):
            mt.barrier()
            began = time.process_time()
            for _ in range(10):
                optimizer.step()
            own.append(time.process_time() - began)
    show("shampoo, CPU time of a rank, two ranks / one", times[0][2:], times[1][2:])


def shampoo_step(rounds: int) -> None:
    """Time training steps of a transformer with Shampoo and with AdamW, alternately."""
    work = []
    for make in (mt.Shampoo, torch.optim.AdamW):
        net = transformer()
        work.append((net, make(net.parameters(), 1e-3)))
    words = torch.randint(512, (16, 129))

    def steps(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(10):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())
            torch.autograd.backward(loss)
            optimizer.step()

    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds + 1):
        for own, pair in zip(times, work, strict=True):
            own.append(timed(partial(steps, *pair)) / 10)
    show("step with shampoo / with AdamW", times[0][1:], times[1][1:])


def noise(rounds: int) -> None:
    """Time the measurement of the noise scale, and a step."""
    net, (images, labels) = model(), samples()

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.cross_entropy(net(images), labels)
        torch.autograd.backward(loss)

    gradients = [torch.randn_like(each) for each in net.parameters()]
    told = np.zeros(4)
    known = NoiseScale()

    def measure() -> None:
        for _ in range(2):
            norms_of(gradients)
        mt.allreduce(torch.from_numpy(told), name="noise")
        known.add(NoiseSample(1.0, 1.0))

    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds + 1):
        times[0].append(timed(measure) / 10)  # the noise scale is measured every tenth step
        times[1].append(timed(step))
    show("noise scale / step", times[0][1:], times[1][1:])


def precision(rounds: int) -> None:
    """Time steps with mixed_precision and with plain autocast, alternately."""
    images, labels = samples()
    plain, ours = model(), model()
    optimizers = [
        mt.DistributedOptimizer(torch.optim.SGD(each.parameters(), 0.01, 0.9), each.named_parameters())
        for each in (plain, ours)
    ]
    switch = mt.mixed_precision(optimizers[1], "bf16")

    def by_hand() -> None:
        optimizers[0].zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.cross_entropy(plain(images), labels)
        torch.autograd.backward(loss)
        optimizers[0].step()

    def by_switch() -> None:
        optimizers[1].zero_grad()
        with switch.autocast():
            loss = nn.functional.cross_entropy(ours(images), labels)
        switch.backward(loss)
        optimizers[1].step()

    def loss_of(each: nn.Module) -> Tensor:
        return nn.functional.cross_entropy(each(images), labels)

    for warm_up in (by_hand, by_switch):
        warm_up()
    report = mt.training_report(ours, loss_of, samples=IMAGES, dtype="bf16")
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        with report.paused():
            times[0].append(timed(by_hand))
        times[1].append(timed(by_switch))
        report.count(IMAGES)
    show("plain autocast / mixed_precision (above 1: ours is faster)", times[0], times[1])
    found = report.finish()
    mt.print_once(found)
    flags = Path("/proc/cpuinfo").read_text()
    able = next((each for each in ("amx_bf16", "avx512_bf16") if each in flags), "none: bf16 is emulated here")
    mt.print_once(f"instructions for bf16: {able}")


def show(what: str, one: list[float], other: list[float]) -> None:
    """Print the ratio of two series with its interval, on rank 0."""
    interval = ratio_interval(one, other)
    medians = f"{1e3 * statistics.median(one):.3f} ms and {1e3 * statistics.median(other):.3f} ms"
    mt.print_once(f"{what}: {interval}; medians {medians}, {len(one)} rounds, {platform.machine()}")


_WORK = {"muon": muon, "shampoo": shampoo, "shampoo-step": shampoo_step, "noise": noise, "precision": precision}


def main() -> None:
    """Run the measurement that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=sorted(_WORK))
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    mt.init(process_sets="dynamic")
    torch.set_num_threads(1)
    _WORK[options.what](options.rounds)


if __name__ == "__main__":
    main()
