"""Measure the time that multiring.torch adds to a collective.

    multiring run -n 2 -- python benchmarks/promises/grouped.py [--rounds N]

The operations are a named allreduce of 64 bytes and a group of ResNet-50's 161 gradients. Every figure is a median over
rounds in microseconds, on the slowest rank. Groups alternate with the raw collective of the same bytes. The small
operation has a floor, relative to a futex ping-pong between two processes in the same run. The group is only reported.
The exit code is 1 if the floor is missed.
"""

import argparse
import ctypes
import mmap
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

import multiring
import multiring.torch as mt

PING_PONGS = 6.0  # the most ping-pongs that an operation of 64 bytes may take
_FUTEX = {"x86_64": 202, "aarch64": 98}
_WAIT, _WAKE = 0, 1


def main() -> int:
    """Print the figures; return 1 if a floor is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=200)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    is_first = os.environ.get("MULTIRING_RANK", "0") == "0"  # noqa: TID251 -- before the job is joined
    ping_pong_us = ping_pong() if is_first else 0.0
    mt.init()
    small_us = small(rounds * 10)
    again_us, raw_us = groups(rounds)
    first_us = first_groups(max(5, rounds // 20))
    missed = False
    if mt.rank() == 0:
        lines = [
            ("futex ping-pong", ping_pong_us, ""),
            ("allreduce_async_ and synchronize, 64 B", small_us, f"<= {PING_PONGS * ping_pong_us:.1f}"),
            ("raw all_reduce of the 161 gradients' bytes", raw_us, ""),
            ("grouped_allreduce_ of them over that, again", again_us, ""),
            ("grouped_allreduce_ of them over that, the first time", first_us, ""),
        ]
        for what, figure, floor in lines:
            print(f"{what:<58}{figure:>10.1f}  {floor}")
        missed = small_us > PING_PONGS * ping_pong_us
    mt.shutdown()
    return int(missed)


def small(rounds: int) -> float:
    """Return the time of a named operation of 64 bytes in microseconds."""
    tensor = torch.ones(16)
    mt.synchronize(mt.allreduce_async_(tensor, name="small"))
    assert tensor.tolist() == [1.0] * 16

    def call() -> None:
        mt.synchronize(mt.allreduce_async_(tensor, name="small"))

    return slowest(statistics.median(timed(call) for _ in range(rounds)))


def groups(rounds: int) -> tuple[float, float]:
    """Return the time that a repeated group adds to the raw collective.

    The second value is the raw collective's time. Both are in microseconds.
    """
    gradients = mt.shared_zeros_like([torch.empty(shape) for shape in resnet50_shapes()])
    array = span_of(gradients)
    world = multiring.world()
    for gradient in gradients:
        gradient.fill_(mt.rank() + 1)
    mt.grouped_allreduce_(gradients)
    mean = (mt.size() + 1) / 2
    assert all(bool((gradient == mean).all()) for gradient in gradients)
    differences, raw = [], []
    for turn in range(rounds):
        calls: list[Callable[[], object]] = [
            lambda: world.all_reduce(array, "average"),
            lambda: mt.grouped_allreduce_(gradients, name="gradients"),
        ]
        taken = [0.0, 0.0]
        for which in (turn % 2, 1 - turn % 2):
            world.barrier()
            taken[which] = timed(calls[which])
        raw.append(taken[0])
        differences.append(taken[1] - taken[0])
    return slowest(statistics.median(differences)), slowest(statistics.median(raw))


def first_groups(times: int) -> float:
    """Return the time that a group's first reduction adds to the raw collective."""
    differences = []
    world = multiring.world()
    shapes = resnet50_shapes()
    for _ in range(times):
        gradients = mt.shared_zeros_like([torch.empty(shape) for shape in shapes])
        array = span_of(gradients)
        raw = []
        for _ in range(3):
            world.barrier()
            raw.append(timed(lambda: world.all_reduce(array, "average")))  # noqa: B023 -- called at once
        world.barrier()
        differences.append(timed(lambda: mt.grouped_allreduce_(gradients)) - statistics.median(raw))  # noqa: B023
    return slowest(statistics.median(differences))


def span_of(gradients: list[torch.Tensor]) -> Any:
    """Return the memory of the gradients as one array."""
    first, last = gradients[0], gradients[-1]
    count = (last.data_ptr() - first.data_ptr()) // 4 + last.numel()
    return first.as_strided((count,), (1,)).numpy()


def resnet50_shapes() -> list[tuple[int, ...]]:
    """Return the shapes of ResNet-50's 25.6 million parameters.

    See He et al., "Deep residual learning", CVPR 2016.
    """
    found: list[tuple[int, ...]] = [(64, 3, 7, 7), (64,), (64,)]
    inputs = 64
    for planes, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            for shape in ((planes, inputs, 1, 1), (planes, planes, 3, 3), (4 * planes, planes, 1, 1)):
                found += [shape, shape[:1], shape[:1]]
            if block == 0:
                found += [(4 * planes, inputs, 1, 1), (4 * planes,), (4 * planes,)]
            inputs = 4 * planes
    return [*found, (1000, 2048), (1000,)]


def timed(call: Callable[[], object]) -> float:
    """Return the microseconds that `call` takes."""
    start = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - start) / 1e3


def slowest(figure_us: float) -> float:
    """Return the largest figure of all ranks."""
    return float(mt.allreduce(torch.tensor(figure_us, dtype=torch.float64), op=mt.Max))


def ping_pong(rounds: int = 2000) -> float:
    """Return the microseconds of a futex ping-pong between this process and a child."""
    memory = mmap.mmap(-1, mmap.PAGESIZE)
    words = (ctypes.c_int32 * 2).from_buffer(memory)
    libc = ctypes.CDLL(None, use_errno=True)
    number = _FUTEX[platform.machine()]

    def wake(word: int, value: int) -> None:
        words[word] = value
        libc.syscall(number, ctypes.byref(words, 4 * word), _WAKE, 1, None, None, 0)

    def wait(word: int, value: int) -> None:
        while words[word] < value:
            libc.syscall(number, ctypes.byref(words, 4 * word), _WAIT, value - 1, None, None, 0)

    child = os.fork()
    if child == 0:
        for value in range(1, rounds + 1):
            wait(0, value)
            wake(1, value)
        os._exit(0)
    taken = []
    for value in range(1, rounds + 1):
        start = time.perf_counter_ns()
        wake(0, value)
        wait(1, value)
        taken.append((time.perf_counter_ns() - start) / 1e3)
    os.waitpid(child, 0)
    return statistics.median(taken)


if __name__ == "__main__":
    sys.exit(main())
