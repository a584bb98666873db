"""Do the ranks have the same data set? A few samples of each are looked at, before anything is trained on them."""

import random
from collections.abc import Iterator, Sized
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from multiring.errors import MismatchError
from multiring.runtime.group.handles import told_apart
from multiring.torch.collectives.allgather import allgather
from multiring.torch.distributing.fingerprints import UNKNOWN, fingerprint

_LOOKED_AT = 5  # samples, evenly spaced: a file is read in milliseconds


def require_same_samples(loader: DataLoader[Any]) -> None:
    """Raise MismatchError, on every rank, where the ranks' map-style data sets differ in one of a few samples.

    Every rank calls it. What cannot be compared is not: samples that are not numbered, that come out otherwise each
    time they are read, or that cannot be read, which training will tell.
    """
    dataset: Any = loader.dataset
    if not isinstance(dataset, Sized) or isinstance(dataset, IterableDataset) or not len(dataset):
        return
    numbers = sorted({step * (len(dataset) - 1) // (_LOOKED_AT - 1) for step in range(_LOOKED_AT)})
    rows: list[list[int]] = allgather(torch.tensor([_read(loader, numbers)]), name="distribute.samples").tolist()
    for number, column in zip(numbers, zip(*rows, strict=True), strict=True):
        known = {rank: f"{each:016x}" for rank, each in enumerate(column) if each != UNKNOWN}
        if len(set(known.values())) > 1:
            raise MismatchError(
                f"distribute: the ranks' data sets differ, first in sample {number} of {len(dataset)}: "
                f"{told_apart(known)}. Each rank has to have all samples, in the same order, as its part of a batch is "
                "said by numbers: files listed in one order (sorted), random data and splits by one seed. Where each "
                "rank is to have its own samples, want sharded=True; where samples are made up, check=False"
            )


def _read(loader: DataLoader[Any], numbers: list[int]) -> list[int]:
    looking = _Looking(loader.dataset, numbers)
    if not loader.num_workers:
        return [looking[place] for place in range(len(numbers))]
    # Where workers read in training one does now: what a data set opens at first use is not to be opened before a fork.
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
    except Exception:  # noqa: BLE001 -- of the worker, as what starts one does in training
        return [UNKNOWN] * len(numbers)


class _Looking(torch.utils.data.Dataset[int]):
    """The fingerprints of some samples of a data set."""

    def __init__(self, dataset: Any, numbers: list[int]) -> None:
        self._dataset = dataset
        self._numbers = numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, place: int) -> int:
        found = set()
        with _generators_kept():
            for _ in range(2):  # random augmentation by a generator of its own comes out otherwise
                _seed(place)
                try:
                    found.add(fingerprint(self._dataset[self._numbers[place]]))
                except Exception:  # noqa: BLE001 -- keys of another kind, or a broken sample; training will tell
                    return UNKNOWN
        return found.pop() if len(found) == 1 else UNKNOWN


@contextmanager
def _generators_kept() -> Iterator[None]:
    """Leave the global generators as they were."""
    kept = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002 -- what data sets draw from
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
