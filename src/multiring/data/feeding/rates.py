"""Measure the rate of a loader, and the rates of reading and decoding alone."""

import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from multiring.data.dataset import Dataset
from multiring.data.feeding.loader import Loader
from multiring.data.readers.source import Image


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """The rates of a loader, and of its parts alone."""

    samples_per_s: float  # samples a second that the loader yields
    bytes_per_s: float  # bytes a second in the loader's batches
    read_per_s: float  # samples a second that one worker reads, without decoding
    make_per_s: float  # samples a second that one worker reads, decodes and augments
    workers: int  # number of workers

    @property
    def predicted(self) -> float:
        """Return the rate in samples a second if only the workers limit it."""
        return self.make_per_s * max(1, self.workers)


def measured(data: Dataset, loader: Loader, seconds: float) -> Rates:
    """Measure a loader, and reading and decoding alone.

    Args:
        data: the loader's data set.
        loader: the loader.
        seconds: the duration of each of the three measurements.
    """
    numbers = np.random.default_rng(0).permutation(len(data))[:4096].tolist()
    read = _paced(numbers, seconds, data.source.record)
    make = _paced(numbers, seconds, data.sample)
    samples = size = 0
    began = 0.0
    while True:
        for batch in loader:
            now = time.monotonic()
            if not began:  # the first batch includes the start of the workers, so it does not count
                began = now
                continue
            samples += max(len(value) for value in batch.values())
            size += sum(_bytes_of(value) for value in batch.values())
            if now - began > seconds:
                break
        passed = time.monotonic() - began
        if passed > seconds or passed <= 0:
            break
    passed = max(passed, 1e-9)
    return Rates(
        samples_per_s=samples / passed,
        bytes_per_s=size / passed,
        read_per_s=read,
        make_per_s=make,
        workers=loader.workers,
    )


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
