"""Compare random programs that use a Loader with a simple model of the loader.

A program opens iterators, takes batches from several of them alternately, drops some and changes the loader's place. It
also closes the loader and meets failing samples. The loader uses process workers. The expected batches follow from the
documented rule: rank r of p gets the samples r, r + p, ... of each batch-sized piece of the order.
"""

import faulthandler
import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.evidence.support.cases import Fault, Random, crowd

from multiring.data import Dataset, Loader, Workers
from multiring.errors import MultiringError

KINDS = ("errors", "iterators", "place", "close")
# The time without a step after which a program counts as hung, per process on a core. Workers must start in this
# time.
HANG_S = 12.0


class Failing:
    """A transform that fails at some samples, in one of several ways."""

    def __init__(self, bad: set[int], how: str) -> None:
        self._bad, self._how = bad, how

    def __call__(self, record: dict[str, Any], generator: Random) -> Any:
        """Return the record, or fail if its sample is bad."""
        del generator
        if int(np.ravel(record["array"])[0]) not in self._bad:
            return record
        if self._how == "raises":
            raise ValueError("a bad sample")
        if self._how == "none":
            return None
        if self._how == "dies":
            os._exit(3)
        # a field that cannot be pickled and that other samples do not have
        return {"array": record["array"], "more": threading.Lock()}


@dataclass(slots=True)
class Opened:
    """An iterator of the loader, and the position of its next batch."""

    batches: Iterator[dict[str, Any]]
    begin: int
    batch: int
    place: tuple[int, int]
    is_over: bool = False

    def rows(self, length: int) -> list[int]:
        """Return the samples of the next batch, or an empty list at the epoch's end."""
        end = min(self.begin + self.batch, length)
        rank, ranks = self.place
        return list(range(self.begin + rank, end, ranks)) or [self.begin] if self.begin < length else []


@dataclass(slots=True)
class Program:
    """A random program and the faults that it found."""

    random: Random
    kinds: set[str]
    length: int
    width: int
    batch: int
    place: tuple[int, int]
    bad: set[int]
    loader: Loader
    done: int = 0
    opened: list[Opened] = field(default_factory=list)
    held: list[tuple[Any, list[int]]] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    log: list[str] = field(default_factory=list)

    @property
    def named(self) -> str:
        """Return the kinds of actions of the program, for the signs of faults."""
        return ", ".join(sorted(self.kinds)) or "nothing"

    def note(self, what: str, text: str) -> None:
        """Record a fault."""
        self.faults.append(Fault(f"loader: {what} with {self.named}", f"{text}\nafter {' '.join(self.log[-30:])}"))

    def run(self) -> None:
        """Do some random steps, then finish all open iterators."""
        self.open()
        for _ in range(int(self.random.integers(5, 40))):
            self.step()
        if not self.opened:
            self.open()
        for each in self.opened:
            while not each.is_over:
                self.take(each)
        self.compare_held()
        self.loader.close()

    def step(self) -> None:
        """Do one random action."""
        choice = self.random.random()
        if "place" in self.kinds and choice < 0.08:
            ranks = int(self.random.integers(1, 6))
            self.place = (int(self.random.integers(ranks)), ranks)
            self.log.append(f"place{self.place}")
            self.loader.place(*self.place)
            self.opened = [] if "iterators" not in self.kinds else self.opened
        elif "close" in self.kinds and choice < 0.16:
            self.log.append("close")
            self.loader.close()
        elif choice < (0.3 if "iterators" in self.kinds else 0.2) and self.opened:
            if "iterators" not in self.kinds:
                self.opened.clear()
            self.open()
        elif choice < 0.35 and len(self.opened) > 1:
            self.opened.pop(int(self.random.integers(len(self.opened))))
            self.log.append("drop")
        else:
            if not self.opened:
                self.open()
            self.take(self.opened[int(self.random.integers(len(self.opened)))])

    def open(self) -> None:
        """Open an iterator at the end of the newest batch of any iterator."""
        if self.done >= self.length:
            self.done = 0
        if len(self.opened) >= 4:
            self.opened.pop(0)
        self.log.append("open")
        self.opened.append(Opened(iter(self.loader), self.done, self.batch, self.place))

    def take(self, one: Opened) -> None:
        """Take the next batch of an iterator and compare it with the expected samples."""
        wanted = [] if one.is_over else one.rows(self.length)
        self.log.append(f"next[{self.opened.index(one)}]")
        try:
            found = next(one.batches)
        except StopIteration:
            one.is_over = True
            if wanted:
                self.note("an end too early", f"samples {wanted[:4]}... did not come")
            return
        except MultiringError as error:
            one.is_over = True
            if not self.bad & set(wanted):
                self.note("an error", f"{type(error).__name__}: {error}; samples {wanted[:8]} have none that fails")
            else:
                # go past the failing batch, as a resuming program would
                self.done = min(one.begin + one.batch, self.length)
                self.loader.load_state_dict(
                    {**self.loader.state_dict(), "epoch": 0, "samples": self.done % self.length}
                )
            return
        if not wanted or self.bad & set(wanted):
            self.note("a batch that cannot be", f"got {np.ravel(found['array'])[:8]}, want {wanted[:8] or 'none'}")
        elif not self.same(found, wanted):
            got = found["array"][:, 0].astype(int).tolist()
            wrong = sum(a != b for a, b in zip(got, wanted, strict=False))
            self.note("rows of other samples", f"{wrong} of {len(wanted)} rows: got {got[:8]}, want {wanted[:8]}")
        one.begin += one.batch
        self.done = min(one.begin, self.length)
        if self.random.random() < 0.3:
            self.held.append((found, wanted))
            if len(self.held) > 6:
                self.held.pop(0)

    def same(self, batch: Any, wanted: list[int]) -> bool:
        """Return whether a batch holds exactly the wanted samples."""
        whole = np.repeat(np.asarray(wanted, np.float64)[:, None], self.width, 1)
        return bool(np.array_equal(batch["array"], whole))

    def compare_held(self) -> None:
        """Check that the batches that the program kept are unchanged."""
        for batch, wanted in self.held:
            if not self.same(batch, wanted):
                self.note("rows of other samples", f"a batch that was kept has changed: {batch['array'][:4, 0]}")


def loaders(random: Random, folder: Path) -> Iterator[Fault]:
    """Run a random program with some kinds of actions; a hang counts as a fault."""
    count = int(random.choice([0, 1, 1, 1, 1, 1, 2, 3]))
    yield from _ran(random, folder, set(random.choice(KINDS, count, replace=False).tolist()))


def places(random: Random, folder: Path) -> Iterator[Fault]:
    """Run a random program whose only kind of action is to change the loader's place."""
    yield from _ran(random, folder, {"place"})


def _ran(random: Random, folder: Path, kinds: set[str]) -> Iterator[Fault]:
    length, width = int(random.integers(20, 600)), int(random.choice([1, 8, 64, 700]))
    batch = int(random.integers(1, min(length, 80) + 1))
    np.save(folder / "a.npy", np.repeat(np.arange(length, dtype=np.float64)[:, None], width, 1))
    bad = set(random.choice(length - 1, 3, replace=False).tolist()) if "errors" in kinds else set()
    bad = {each + 1 for each in bad}  # the first sample defines the layout of the batches, so it must be good
    how = str(random.choice(["raises", "none", "strange"] + ["dies"] * (random.random() < 0.1)))
    context = str(random.choice(["fork", "fork", "fork", "forkserver", "spawn"]))
    ranks = int(random.integers(1, 5))
    place = (int(random.integers(ranks)), ranks)
    data = Dataset(str(folder), shuffle="none", transform=Failing(bad, how) if bad or random.random() < 0.5 else None)
    workers = Workers(int(random.integers(1, 4)), processes=True, ahead=int(random.integers(1, 5)), context=context)
    allocate: Any = np.empty if random.random() < 0.5 else None
    loader = Loader(data, batch, rank=place[0], ranks=place[1], workers=workers, allocate=allocate)
    program = Program(random, kinds, length, width, batch, place, bad, loader)
    failed: list[BaseException] = []

    def run() -> None:
        try:
            program.run()
        except BaseException as error:  # noqa: BLE001 -- raised where the program is waited for
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    steps = -1
    while thread.is_alive() and steps != len(program.log):
        steps = len(program.log)
        thread.join(HANG_S * crowd())
    if thread.is_alive():
        faulthandler.dump_traceback(sys.stderr)
        yield Fault(
            f"loader: a hang with {program.named}", f"{how}, {context}, {workers}: {' '.join(program.log[-30:])}"
        )
        return
    if failed:
        kind = type(failed[0]).__name__
        text = f"{failed[0]}\nafter {' '.join(program.log[-30:])}"
        yield Fault(f"loader: {kind} with {program.named}", text)
    yield from program.faults
