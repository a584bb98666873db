"""Measure the rate of a loader, and what one worker takes for a sample."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from multiring.data.dataset import Dataset
from multiring.data.feeding.loader import Loader
from multiring.data.readers.source import Image
from multiring.data.stages import working_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """The rates of a loader, of one worker, and of reading."""

    samples_per_s: float  # samples a second that the loader yields
    bytes_per_s: float  # bytes a second in the loader's batches
    read_per_s: float  # samples a second that one worker reads one by one, without decoding
    worker_s: float  # seconds in which one worker alone reads and decodes a sample, and copies it into a batch
    cpu_s: float  # of that, processor time
    batch_s: float  # seconds of processor time in which the caller's own thread begins and takes a batch


def measured(
    data: Dataset, loader: Loader, alone: Loader, seconds: float, meet: Callable[[], None] = lambda: None
) -> Rates:
    """Measure a loader, one worker, and reading.

    Args:
        data: the loaders' data set.
        loader: the loader.
        alone: a loader that differs from it in that it has one worker.
        seconds: the duration of each of the three measurements.
        meet: called before each of them. In a job, it lets all ranks measure at the same time.
    """
    numbers = np.random.default_rng(0).permutation(len(data))[:4096].tolist()
    meet()
    read = _paced(numbers, seconds, data.source.record)
    meet()
    one = _fed(alone, seconds)
    alone.close()
    meet()
    found = _fed(loader, seconds)
    return Rates(
        samples_per_s=found.samples / found.seconds,
        bytes_per_s=found.size_bytes / found.seconds,
        read_per_s=read,
        worker_s=working_s(one.spent) / one.samples,
        cpu_s=one.spent.get("cpu", 0.0) / one.samples,
        batch_s=one.own_s / one.batches,
    )


@dataclass(frozen=True, slots=True)
class _Fed:
    """What a loader yielded: in which time, and the seconds of its workers by stage.

    `own_s` is processor time of the thread that took the batches.
    """

    samples: int
    batches: int
    size_bytes: int
    seconds: float
    own_s: float
    spent: Mapping[str, float]


def _fed(loader: Loader, seconds: float) -> _Fed:
    samples = size = batches = 0
    began, began_own_s, before = 0.0, 0.0, dict[str, float]()
    while True:
        for batch in loader:
            now = time.monotonic()
            if not before:  # the first batch includes the start of the workers, so it does not count
                began, began_own_s, before = now, time.thread_time(), dict(loader.spent)
                continue
            batches += 1
            samples += max(len(value) for value in batch.values())
            size += sum(_bytes_of(value) for value in batch.values())
            if now - began > seconds:
                break
        passed = time.monotonic() - began
        if samples and passed > seconds:
            break
    spent = {name: each - before.get(name, 0.0) for name, each in loader.spent.items()}
    return _Fed(samples, batches, size, passed, time.thread_time() - began_own_s, spent)


def _bytes_of(value: Any) -> int:
    if isinstance(value, np.ndarray):
        return value.nbytes
    return sum(len(each) for each in value if isinstance(each, bytes | str | Image | np.ndarray))


def _paced(numbers: list[int], seconds: float, act: Any) -> float:
    began = time.monotonic()
    done = 0
    while (passed := time.monotonic() - began) < seconds:
        act(numbers[done % len(numbers)])
        done += 1
    return done / passed
