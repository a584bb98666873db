"""Random programs of collectives on device tensors, against NumPy.

All ranks run the same program, which a seed makes. Types, sizes, layouts, devices of the process, streams, names,
process sets, host tensors in between, the order of `synchronize`, early deleted tensors and dropped handles are random.
In some programs, the ranks start named operations in different orders, or NCCL reduces large tensors only, or it starts
ahead of the ranks' agreement soon. Values are small integers, so that sums are exact in every type and order.
"""

import random
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tests.support.ranks import Here
from torch import Tensor

import multiring.torch as mt
from multiring._frontend import follow_ups
from multiring.torch.collectives import by_nccl

STEPS = 60
DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.complex64,
    torch.complex128,
)
SHAPES: tuple[tuple[int, ...], ...] = ((), (0, 2), (1,), (7,), (33, 3), (2000,), (70, 300), (5, 4, 3), (300, 500))
REDUCERS: dict[str, Callable[..., NDArray[Any]]] = {"sum": np.sum, "min": np.min, "max": np.max}
Values = NDArray[np.float64]
LARGE_BYTES = by_nccl.LEAST_BYTES


@dataclass(frozen=True, slots=True)
class Started:
    """An operation in flight: its handle, what to wait with, and the values that it must give.

    rounding: how much they may differ from what comes; 0 if they are exact.
    """

    what: str
    wait: Callable[[], Any]
    wanted: list[Values]
    rounding: float = 0.0


class Program:
    """One rank's run of the program of a seed."""

    def __init__(self, here: Here, seed: int, sets: list[Any]) -> None:
        self.rank, self.seed = here.rank, seed
        self.random = random.Random(seed)  # noqa: S311 -- the same on all ranks
        self.sets = sets
        own, count = torch.cuda.current_device(), torch.cuda.device_count()
        self.devices = [torch.device("cuda", (own + each) % count) for each in range(count)]
        self.streams = {
            device: [torch.cuda.default_stream(device), *(torch.cuda.Stream(device) for _ in range(2))]
            for device in self.devices
        }
        self.started: list[Started | None] = []  # None: this rank is not in the set
        self.swaps = self.random.random() < 0.3
        self.number = 0

    def stream(self) -> torch.cuda.Stream:
        """Return a stream, more often of the rank's own device than of the others."""
        device = self.devices[0] if self.random.random() < 0.7 else self.random.choice(self.devices)
        return self.random.choice(self.streams[device])

    def values(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype, salt: int = 0) -> Values:
        """Return what a rank passes to this step; the type can hold the values and their sums."""
        generator = np.random.default_rng((self.seed, self.number, rank, salt))
        found = generator.integers(-3, 4, shape).astype(np.float64)
        if dtype is torch.bool:
            return np.asarray(found > 1, np.float64)
        return np.asarray(np.abs(found)) if dtype is torch.uint8 else np.asarray(found)

    def tensor(self, values: Values, dtype: torch.dtype, stream: torch.cuda.Stream) -> Tensor:
        """Return a tensor that the stream writes late, or a host tensor."""
        host, layout = torch.from_numpy(values).to(dtype), self.random.choice(("rows", "rows", "columns", "gaps"))
        if self.random.random() < 0.2:
            return host
        with torch.cuda.stream(stream):
            torch.full(values.shape, 9, dtype=dtype, device=stream.device)  # memory that is free, and written late
            if layout == "rows" or not values.ndim:
                return late(host.to(stream.device))
            if layout == "columns":
                turned = tuple(reversed(range(values.ndim)))
                return late(host.permute(turned).contiguous().to(stream.device)).permute(turned)
            return late(torch.stack([host, host], -1).to(stream.device))[..., 0]

    def litter(self, stream: torch.cuda.Stream) -> None:
        """Write to memory that the program has freed on a device."""
        shape = self.random.choice(SHAPES)
        with torch.cuda.stream(self.random.choice(self.streams[stream.device])):
            torch.full(shape, 9.0, device=stream.device)

    def run(self, steps: int) -> None:
        """Run the program."""
        for _ in range(steps):
            self.number += 1
            chosen, stream = self.random.choice(self.sets), self.stream()
            kind = self.random.choice((self.reduce, self.reduce, self.group, self.gather, self.send, self.exchange))
            if self.swaps and self.random.random() < 0.1:
                self.started += self.swapped(stream)
                continue
            dtype, name = self.random.choice(DTYPES), self.random.choice((None, f"step {self.seed}.{self.number}"))
            started = kind(chosen, stream, dtype, name)
            self.litter(stream)
            if self.random.random() < 0.1:
                continue  # the handle is dropped
            self.started.append(started)
            while self.started and self.random.random() < 0.45:
                self.finish(self.started.pop(self.random.randrange(len(self.started))))
        self.random.shuffle(self.started)
        while self.started:
            self.finish(self.started.pop())
        if self.swaps:
            mt.join()  # the ranks return to the order of their calls
        mt.barrier()
        for device in self.devices:
            torch.cuda.synchronize(device)

    def finish(self, started: Started | None) -> None:
        """Synchronize an operation on some stream of each device, and compare."""
        chosen = [self.random.choice(self.streams[device]) for device in self.devices]
        if started is None:
            return
        with ExitStack() as stack:
            for stream in chosen:  # each becomes the current stream of its device
                stack.enter_context(torch.cuda.stream(stream))
            stack.enter_context(torch.cuda.device(self.devices[0]))
            found = started.wait()
            found = found if isinstance(found, list | tuple) else [found]
            kept = [late(each) for each in found]
            del found
            for each in kept:
                torch.full_like(each, 9)
            copies = [each.cpu().to(torch.complex128).numpy() for each in kept]
        for copy, wanted in zip(copies, started.wanted, strict=True):
            is_right = np.allclose(copy, wanted, rtol=0.0, atol=started.rounding)
            assert is_right, (self.seed, started.what, copy, wanted)

    def is_member(self, chosen: Any) -> bool:
        return self.rank in chosen.ranks

    def shape(self) -> tuple[int, ...]:
        return self.random.choice(SHAPES)

    def reduce(self, chosen: Any, stream: torch.cuda.Stream, dtype: torch.dtype, name: str | None) -> Started | None:
        shape, op, in_place = self.shape(), self.random.choice((*REDUCERS, "average")), self.random.random() < 0.5
        factors = self.random.choice(((1.0, 1.0), (2.0, 1.0), (1.0, 4.0), (0.5, 2.0)))
        if not dtype.is_floating_point:
            op, factors = ("sum" if op == "average" or dtype.is_complex else op), (1.0, 1.0)
        every = [self.values(rank, shape, dtype) for rank in chosen.ranks]
        own = self.tensor(self.values(self.rank, shape, dtype), dtype, stream)
        if not self.is_member(chosen):
            return None
        total = total_of(REDUCERS.get(op, np.sum), every, dtype) * (factors[0] * factors[1])
        wanted = torch.from_numpy(np.asarray(total)).to(dtype) / (len(every) if op == "average" else 1)
        call = mt.allreduce_async_ if in_place else mt.allreduce_async
        with torch.cuda.stream(stream):
            scaling: dict[str, Any] = {"prescale_factor": factors[0], "postscale_factor": factors[1]}
            handle = call(own, op=op, name=name, process_set=chosen, **scaling)
        values = wanted.to(dtype).double().numpy() if op == "average" else np.asarray(total)
        # With NCCL inside hosts of unequal sizes, the terms of an average, at most 3, are rounded before the result is.
        is_exact = op != "average" or len(every) in (1, 2, 4)
        rounding = 0.0 if is_exact else 2 * 3 * torch.finfo(dtype).eps
        return Started(f"{op} {dtype} {shape} {self.number}", lambda: mt.synchronize(handle), [values], rounding)

    def swapped(self, stream: torch.cuda.Stream) -> list[Started | None]:
        """Start named reductions over all ranks, in an order that differs between the ranks."""
        shapes = [self.shape() for _ in range(self.random.randint(2, 4))]
        order = list(range(len(shapes)))
        random.Random(f"{self.seed} {self.number} {self.rank}").shuffle(order)  # noqa: S311 -- no secret
        found: dict[int, Started] = {}
        for place in order:
            shape = shapes[place]
            own = torch.from_numpy(self.values(self.rank, shape, torch.float32, place)).float()
            ranks = self.sets[0].ranks
            wanted = total_of(np.sum, [self.values(each, shape, torch.float32, place) for each in ranks], torch.float32)
            with torch.cuda.stream(stream):
                sent = late(own.to(stream.device))
                handle = mt.allreduce_async(sent, op="sum", name=f"swapped {self.seed}.{self.number}.{place}")
            found[place] = Started(f"swapped {shape}", partial(mt.synchronize, handle), [wanted])
        return [found[place] for place in range(len(shapes))]

    def group(self, chosen: Any, stream: torch.cuda.Stream, dtype: torch.dtype, name: str | None) -> Started | None:
        shapes, in_place = [self.shape() for _ in range(self.random.randint(1, 4))], self.random.random() < 0.5
        dtypes = [self.random.choice((dtype, torch.float32)) for _ in shapes]
        streams = [stream, *(self.stream() for _ in shapes[1:])]
        own = [
            self.tensor(self.values(self.rank, shape, kind, place), kind, streams[place])
            for place, (shape, kind) in enumerate(zip(shapes, dtypes, strict=True))
        ]
        if not self.is_member(chosen):
            return None
        wanted = [
            total_of(np.sum, [self.values(rank, shape, kind, place) for rank in chosen.ranks], kind)
            for place, (shape, kind) in enumerate(zip(shapes, dtypes, strict=True))
        ]
        call = mt.grouped_allreduce_async_ if in_place else mt.grouped_allreduce_async
        with ExitStack() as stack:
            for each in {each.device: each for each in streams}.values():
                # Streams of one device must be ordered by the program.
                for other in (other for other in streams if other.device == each.device and other != each):
                    each.wait_stream(other)
                stack.enter_context(torch.cuda.stream(each))
            stack.enter_context(torch.cuda.device(stream.device))
            handle = call(own, op="sum", name=name, process_set=chosen)
        return Started(f"group {dtypes} {shapes} {self.number}", lambda: mt.synchronize(handle), wanted)

    def gather(self, chosen: Any, stream: torch.cuda.Stream, dtype: torch.dtype, name: str | None) -> Started | None:
        counts = [self.random.randint(0, 60) for _ in range(max(chosen.ranks) + 1)]
        is_on_device = self.random.random() < 0.8
        if not self.is_member(chosen):
            return None
        own = torch.from_numpy(self.values(self.rank, (counts[self.rank], 5), dtype)).to(dtype)
        wanted = np.concatenate([self.values(rank, (counts[rank], 5), dtype) for rank in chosen.ranks])
        with torch.cuda.stream(stream):
            sent = late(own.to(stream.device)) if is_on_device else own
            handle = mt.allgather_async(sent, name=name, process_set=chosen)
        return Started(f"gather {dtype} {counts} {self.number}", lambda: mt.synchronize(handle), [wanted])

    def send(self, chosen: Any, stream: torch.cuda.Stream, dtype: torch.dtype, name: str | None) -> Started | None:
        shape, root, in_place = self.shape(), self.random.choice(chosen.ranks), self.random.random() < 0.5
        own = self.tensor(self.values(self.rank, shape, dtype), dtype, stream)
        if not self.is_member(chosen):
            return None
        call = mt.broadcast_async_ if in_place else mt.broadcast_async
        with torch.cuda.stream(stream):
            handle = call(own, root, name=name, process_set=chosen)
        wanted = self.values(root, shape, dtype)
        return Started(f"broadcast {dtype} {shape} {self.number}", lambda: mt.synchronize(handle), [wanted])

    def exchange(self, chosen: Any, stream: torch.cuda.Stream, dtype: torch.dtype, name: str | None) -> Started | None:
        each, scatters = self.random.randint(0, 50), self.random.random() < 0.5
        size = len(chosen.ranks)
        own = self.tensor(self.values(self.rank, (each * size, 3), dtype), dtype, stream)
        if not self.is_member(chosen):
            return None
        place = list(chosen.ranks).index(self.rank)
        every = [self.values(rank, (each * size, 3), dtype) for rank in chosen.ranks]
        rows = slice(place * each, (place + 1) * each)
        with torch.cuda.stream(stream):
            if scatters:
                handle = mt.reducescatter_async(own, name=name, op="sum", process_set=chosen)
                wanted = total_of(np.sum, every, dtype)[rows]
                return Started(f"scatter {dtype} {each}", lambda: mt.synchronize(handle), [wanted])
            handle = mt.alltoall_async(own, name=name, process_set=chosen)
        wanted = np.concatenate([values[rows] for values in every])
        return Started(f"alltoall {dtype} {each}", lambda: mt.synchronize(handle)[:1], [wanted])


def late(tensor: Tensor) -> Tensor:
    """Return a copy that a kernel writes, which is late on a stand-in."""
    return tensor & tensor if tensor.dtype is torch.bool else tensor * 1


def total_of(reducer: Callable[..., NDArray[Any]], every: list[Values], dtype: torch.dtype) -> Values:
    """Return the reduction of the ranks' values in this type."""
    total = np.asarray(reducer(every, axis=0))
    return np.asarray(np.minimum(total, 1.0)) if dtype is torch.bool else total


def run_programs(here: Here, seeds: list[int]) -> None:
    """Run the programs of some seeds."""
    everybody = list(range(here.size))
    parts = {1: [], 2: [[0], [1]]}.get(here.size, [everybody[:2], everybody[1:], everybody[::2], [here.size - 1]])
    sets = [mt.ProcessSet(ranks) for ranks in parts]
    by_nccl.LEAST_BYTES = LARGE_BYTES if seeds[0] % 3 == 0 else 0  # 0: NCCL reduces small tensors, too
    if seeds[0] % 2:  # operations of these short programs start ahead of their agreements, too
        follow_ups.BEHIND, follow_ups.EQUAL = 4, 2
    here.take_host()
    mt.init(process_sets=sets)
    for seed in seeds:
        Program(here, seed, [mt.global_process_set, *sets]).run(STEPS)
