"""A check that all ranks have the same data set, by a few of its samples."""

import random
from collections.abc import Iterator, Sized
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from multiring._runtime.group.handles import told_apart
from multiring.data.dataset import Samples
from multiring.errors import MismatchError
from multiring.torch.collectives.allgather import allgather
from multiring.torch.distributing.fingerprints import UNKNOWN, fingerprint

_LOOKED_AT = 5  # number of evenly spaced samples to compare: reading a file takes milliseconds


def require_same_samples(loader: DataLoader[Any]) -> None:
    """Raise MismatchError on every rank if the ranks' map-style data sets differ.

    The ranks compare a few samples. Every rank has to call it. It skips samples that cannot be compared: samples
    without numbers, samples that differ at each read, and samples that cannot be read. Training reports the last kind.
    """
    dataset: Any = loader.dataset
    if not isinstance(dataset, Sized) or isinstance(dataset, IterableDataset) or not len(dataset):
        return
    numbers = _spaced(len(dataset))
    if (difference := _difference(_read(loader, numbers))) is not None:
        place, told = difference
        raise MismatchError(
            f"distribute: the ranks' data sets differ, first in sample {numbers[place]} of {len(dataset)}: {told}. "
            "Each rank has to have all samples, in the same order, because ranks exchange sample numbers: list files "
            "in one order (sorted), and make random data and splits with the same seed. If each rank is meant to have "
            "its own samples, pass sharded=True; if they are random, check=False"
        )


def require_same_stored(samples: Samples) -> None:
    """Raise MismatchError on every rank if the ranks' data sets of `multiring.data` differ.

    The names, the sizes and the order of the shards are equal already. A transform, or the contents of files of equal
    sizes, can still differ. The ranks compare a few samples, as `require_same_samples` does.
    """
    length = samples.order.length
    numbers: list[int] = samples.order.samples(0, np.array(_spaced(length))).tolist()
    looking = _Looking(_Stored(samples), numbers)
    if (difference := _difference([looking[place] for place in range(len(numbers))])) is not None:
        place, told = difference
        raise MismatchError(
            f"distribute: the ranks' data sets differ, first in sample {numbers[place]}: {told}. Names and sizes of "
            "the shards are equal, so the transforms or the contents of files differ: want the same data and the same "
            "transform on every rank. If the transform draws numbers of its own, pass check=False"
        )


class _Stored:
    """The samples of a data set of `multiring.data` in epoch 0, by number."""

    def __init__(self, samples: Samples) -> None:
        self._samples = samples

    def __getitem__(self, number: int) -> Any:
        return self._samples.sample(number)


def _spaced(count: int) -> list[int]:
    """Return a few evenly spaced numbers from 0 to `count` - 1."""
    return sorted({step * (count - 1) // (_LOOKED_AT - 1) for step in range(_LOOKED_AT)})


def _difference(own: list[int]) -> tuple[int, str] | None:
    """Return the first place in which the ranks' fingerprints differ, and each rank's; None if they are equal."""
    rows: list[list[int]] = allgather(torch.tensor([own], device="cpu"), name="distribute.samples").tolist()
    for place, column in enumerate(zip(*rows, strict=True)):
        known = {rank: f"{each:016x}" for rank, each in enumerate(column) if each != UNKNOWN}
        if len(set(known.values())) > 1:
            return place, told_apart(known)
    return None


def _read(loader: DataLoader[Any], numbers: list[int]) -> list[int]:
    looking = _Looking(loader.dataset, numbers)
    if not loader.num_workers:
        return [looking[place] for place in range(len(numbers))]
    # If workers read the samples in training, a worker must read them here too. A data set may open a file at its first
    # read, and must not do so before the workers are forked.
    workers = DataLoader(
        looking,
        batch_size=None,
        num_workers=1,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=torch.Generator(),
    )
    try:
        return [int(each) for each in workers]
    except Exception:  # noqa: BLE001 -- an error of the worker or of its start, which training will raise again
        return [UNKNOWN] * len(numbers)


class _Looking(torch.utils.data.Dataset[int]):
    """A data set of the fingerprints of some samples of another data set."""

    def __init__(self, dataset: Any, numbers: list[int]) -> None:
        self._dataset = dataset
        self._numbers = numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, place: int) -> int:
        found = set()
        with _generators_kept():
            for _ in range(2):  # random augmentation with its own generator differs between two reads
                _seed(place)
                try:
                    found.add(fingerprint(self._dataset[self._numbers[place]]))
                except Exception:  # noqa: BLE001 -- keys of another kind, or a broken sample, which training will report
                    return UNKNOWN
        return found.pop() if len(found) == 1 else UNKNOWN


@contextmanager
def _generators_kept() -> Iterator[None]:
    """Restore the global random number generators on exit."""
    kept = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002 -- data sets draw from it
    try:
        yield
    finally:
        random.setstate(kept[0])
        np.random.set_state(kept[1])  # noqa: NPY002 -- as above
        torch.set_rng_state(kept[2])


def _seed(number: int) -> None:
    random.seed(number)
    np.random.seed(number)  # noqa: NPY002 -- as above
    torch.default_generator.manual_seed(number)
