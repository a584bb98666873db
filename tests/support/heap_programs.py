"""Random programs of reductions in torch's own memory, which torch reuses.

No operation may change the bytes of another tensor. All ranks draw the same program from a seed. The program reduces
tensors of up to 6 MiB: alone, coalesced, as views, and in several groups that are created and destroyed. It resizes
tensors, frees their storages and allocates them again, frees tensors, aliases them, and shares them with NumPy.
Meanwhile a thread allocates memory, and forked children check all tensors and write to them.

All elements of a tensor have the same value, so that a foreign byte is visible. Damage to the allocator's own data
makes the allocator fail.
"""

import os
import random
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

_LEAST, _MOST, _LEAST_SMALL = 200_000, 1_500_000, 1000  # elements of 4 bytes
_HELD = 8
_LOOK = 509  # checks look at every 509th element
_CHILD_S = 30
Meet = Callable[[], AbstractContextManager[Any]]


@dataclass(slots=True)
class _Held:
    tensor: Tensor
    value: float = 0.0
    others: list[Any] = field(default_factory=list)  # views of the same memory, in torch and NumPy
    is_numpys: bool = False

    def fill(self, value: float) -> None:
        self.value = value
        self.tensor.fill_(value)

    def require(self, what: str, step: int = _LOOK) -> None:
        flat = self.tensor.view(-1)
        for part in (flat[::step], flat[-1:]):
            wrong = (part != self.value).nonzero()
            if len(wrong):
                at = int(wrong[0])
                raise AssertionError(
                    f"{what}: {len(wrong)} of {len(part)} elements are wrong, the first, {at * step}, is "
                    f"{float(part[at])}; want {self.value}"
                )
        for other in self.others:
            assert float(other[len(other) // 2]) == self.value, f"{what}: an alias has another value"


class Program:
    """A program; every rank has the same.

    Args:
        seed: seeds the random choices.
        meet: returns a context in which torch.distributed has a default process group.
        forks: whether the program forks children.
        threads: whether another thread allocates memory meanwhile.
    """

    def __init__(self, seed: int, meet: Meet, *, forks: bool = True, threads: bool = True) -> None:
        self._draw = random.Random(seed)  # noqa: S311 -- draws a program
        self._meet = meet
        self._threads = threads
        self._held: list[_Held] = []
        self._groups: list[Any] = []
        self._in_flight: list[tuple[Any, list[_Held]]] = []
        self._counted = 0
        self._turns: list[tuple[int, Callable[[], None]]] = [
            (6, self._allocate),
            (16, self._reduce),
            (4, self._coalesce),
            (5, self._reduce_part),
            (4, self._free),
            (5, self._resize),
            (5, self._give_up_storage),
            (3, self._alias),
            (2, self._new_group),
            (3, self._end_group),
            (1 if forks else 0, self._fork),
        ]

    def run(self, turns: int, *, worlds: int = 3) -> None:
        """Run `turns` turns, divided among `worlds` default process groups in sequence."""
        is_over = threading.Event()
        beside = threading.Thread(target=_allocate_beside, args=(is_over,), daemon=True)
        if self._threads:
            beside.start()
        try:
            for _ in range(worlds):
                with self._meet():
                    for _ in range(turns // worlds):
                        self._turn()
                    if self._draw.random() < 0.5:
                        self._wait()
                    left, self._in_flight = self._in_flight, []
                    self._groups.clear()
                for work, _ in left:
                    work.wait()
                for held in self._held:
                    held.require("after the group of all ranks has ended", 1)
        finally:
            is_over.set()
            if self._threads:
                beside.join()

    def _turn(self) -> None:
        weights, actions = zip(*self._turns, strict=True)
        (action,) = self._draw.choices(actions, weights)
        action()
        name = action.__name__
        busy = {id(held) for _, each in self._in_flight for held in each}
        for held in self._held:
            if id(held) not in busy:
                held.require(f"after {name}")

    # ---- tensors ----

    def _count(self) -> int:
        return self._draw.choice([self._draw.randrange(_LEAST, _MOST), 300_001, 1 << 19])

    def _next_value(self) -> float:
        self._counted = (self._counted + 1) % 1000
        return float(self._counted)

    def _pick(self, *, is_free: bool = False) -> _Held | None:
        """Return a tensor that no operation is using, or None.

        With `is_free`, nothing else may refer to the tensor's memory.
        """
        busy = {id(held) for _, each in self._in_flight for held in each}
        fits = [
            held for held in self._held if id(held) not in busy and not (is_free and (held.is_numpys or held.others))
        ]
        return self._draw.choice(fits) if fits else None

    def _allocate(self) -> None:
        if len(self._held) >= _HELD:
            self._free()
        is_numpys = self._draw.random() < 0.2
        count = self._count()
        tensor = torch.from_numpy(np.empty(count, np.float32)) if is_numpys else torch.empty(count)
        held = _Held(tensor, is_numpys=is_numpys)
        held.fill(self._next_value())
        self._held.append(held)

    def _free(self) -> None:
        held = self._pick()
        if held is not None:
            self._held = [each for each in self._held if each is not held]

    def _alias(self) -> None:
        held = self._pick()
        if held is not None:
            view = held.tensor.view(-1)[self._draw.randrange(_LEAST_SMALL // 2) :]
            held.others.append(view.numpy() if self._draw.random() < 0.5 else view)

    def _resize(self) -> None:
        held = self._pick(is_free=True)
        if held is not None:
            held.tensor.resize_(self._count())
            held.fill(self._next_value())

    def _give_up_storage(self) -> None:
        """Free a tensor's storage, let others use the memory, and allocate it again.

        The new storage has the same size or another one.
        """
        held = self._pick(is_free=True)
        if held is None:
            return
        before = held.tensor.numel()
        storage = held.tensor.untyped_storage()
        storage.resize_(0)
        for _ in range(self._draw.randrange(3)):
            self._allocate_small()
        less = max(_LEAST_SMALL, before // 2)
        after = self._draw.choice([before, self._count(), less, less])
        storage.resize_(4 * after)
        held.tensor = torch.empty(0).set_(storage, 0, (after,), (1,))
        held.fill(self._next_value())

    def _allocate_small(self) -> None:
        held = _Held(torch.empty(self._draw.choice([_LEAST_SMALL, 30_000, 300_001])))
        held.fill(self._next_value())
        self._held.append(held)
        if len(self._held) > 2 * _HELD:
            self._free()

    # ---- collectives ----

    def _group(self) -> Any:
        return self._draw.choice([None, *self._groups])

    def _contribute(self, held: _Held) -> None:
        base, ranks = self._next_value(), dist.get_world_size()
        held.fill(base + dist.get_rank())
        held.value = ranks * base + ranks * (ranks - 1) // 2

    def _reduce(self) -> None:
        held = self._pick()
        if held is None:
            return
        group = self._group()
        for _ in range(self._draw.randrange(1, 4)):
            self._contribute(held)
            if self._draw.random() < 0.3:
                self._in_flight.append((dist.all_reduce(held.tensor, group=group, async_op=True), [held]))
                if self._draw.random() < 0.7:
                    self._wait()
                break
            dist.all_reduce(held.tensor, group=group)
            held.require("all_reduce", 1)

    def _coalesce(self) -> None:
        busy = {id(held) for _, each in self._in_flight for held in each}
        free = [held for held in self._held if id(held) not in busy]
        chosen = self._draw.sample(free, min(len(free), 3))
        if not chosen:
            return
        for held in chosen:
            self._contribute(held)
        dist.all_reduce_coalesced([held.tensor for held in chosen], group=self._group())
        for held in chosen:
            held.require("all_reduce_coalesced", 1)

    def _reduce_part(self) -> None:
        """Reduce the middle of a tensor; the elements beside it must not change."""
        held = self._pick()
        if held is None:
            return
        flat, ranks = held.tensor.view(-1), dist.get_world_size()
        first = self._draw.randrange(flat.numel() // 4)
        part = flat[first : first + flat.numel() // 2]
        for _ in range(self._draw.randrange(1, 4)):
            part.fill_(dist.get_rank())
            dist.all_reduce(part, group=self._group())
            assert (part == ranks * (ranks - 1) // 2).all(), "a part's sum"
        part.fill_(held.value)
        held.require("all_reduce of a part", 1)

    def _wait(self) -> None:
        for work, each in self._in_flight:
            work.wait()
            for held in each:
                held.require("all_reduce, waited for later", 1)
        self._in_flight.clear()

    def _new_group(self) -> None:
        if len(self._groups) < 3:
            self._groups.append(dist.new_group(list(range(dist.get_world_size()))))

    def _end_group(self) -> None:
        if self._groups:
            if self._draw.random() < 0.5:  # otherwise the group ends with operations in flight
                self._wait()
            dist.destroy_process_group(self._groups.pop(self._draw.randrange(len(self._groups))))

    def _fork(self) -> None:
        """Fork a child, which must see the tensors' values of the time of the fork.

        The child's writes and frees must not change the parent's tensors.
        """
        self._wait()
        told, tell = os.pipe()
        child = os.fork()
        if child == 0:
            os._exit(self._be_child(told, tell))
        os.close(told)
        before = [held.value for held in self._held]
        for held in self._held:
            held.fill(self._next_value())
        os.close(tell)
        _, status = os.waitpid(child, 0)
        assert status == 0, f"a forked child ended with status {status}; it had to see {before}"

    def _be_child(self, told: int, tell: int) -> int:
        try:
            threading.Timer(_CHILD_S, os._exit, (3,)).start()
            os.close(tell)
            os.read(told, 1)  # returns once the parent has written
            for held in self._held:
                held.require("in a forked child")
                held.tensor.fill_(-1)
            self._held.clear()
            kept = [torch.full((200_000,), float(number)) for number in range(20)]
            assert all(bool((each == number).all()) for number, each in enumerate(kept))
        except BaseException as error:  # noqa: BLE001 -- the exit status reports it
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
            return 1
        return 0


def _allocate_beside(is_over: threading.Event) -> None:
    """Allocate and free memory until `is_over`; check that it stays unchanged."""
    draw = random.Random(1)  # noqa: S311 -- draws sizes
    kept: list[Tensor] = []
    while not is_over.wait(0.001):
        kept.append(torch.full((draw.randrange(1000, 400_000),), 5.0))
        if len(kept) > 6:
            gone = kept.pop(draw.randrange(len(kept)))
            assert bool((gone[::100] == 5).all()), "another thread's memory has changed"
