"""Measure what the worker processes of torch's DataLoader take for samples.

Workers are usually forks of the script's process, so they have its replaced functions and its shared memory. Workers
that were started in another way count nothing.
"""

import mmap
import os
import time
from typing import Any

import numpy as np
from torch.utils.data import get_worker_info
from torch.utils.data._utils import fetch

from multiring._steps.step_counters import MadeSamples
from multiring.data.feeding.batches import queued_s

# A worker adds to the row that its process's number chooses. Two workers that run at the same time hardly ever have
# numbers that are a multiple of this apart.
_ROWS, _COLUMNS = 4096, 3  # samples, seconds of workers, processor time
_FLOAT_BYTES = 8


class WorkerTimes:
    """What the workers of all of torch's loaders have made since `install`."""

    def __init__(self) -> None:
        memory = mmap.mmap(-1, _ROWS * _COLUMNS * _FLOAT_BYTES)  # which forks share
        self._sums = np.frombuffer(memory, np.float64).reshape(_ROWS, _COLUMNS)
        self._process, self._cpu_s = 0, 0.0

    def install(self) -> None:
        """Replace the functions by which torch's workers make a batch."""
        self._replace_fetch(fetch._MapDatasetFetcher)  # noqa: SLF001 -- no public name has it
        self._replace_fetch(fetch._IterableDatasetFetcher)  # noqa: SLF001 -- as above

    def _replace_fetch(self, kind: Any) -> None:
        plain = kind.fetch

        def timed(fetcher: Any, index: Any) -> Any:
            # Without automatic batches, the number of samples is not known.
            if get_worker_info() is None or not fetcher.auto_collation:
                return plain(fetcher, index)
            began_s, began_cpu_s, began_queued_s = time.perf_counter(), time.process_time(), queued_s()
            found = plain(fetcher, index)
            took_s = time.perf_counter() - began_s - (queued_s() - began_queued_s)
            self._count(len(index), took_s, began_cpu_s)
            return found

        kind.fetch = timed

    def _count(self, samples: int, took_s: float, began_cpu_s: float) -> None:
        process, now_s = os.getpid(), time.process_time()
        # Since the last batch, the worker has sent that batch.
        sent_s = began_cpu_s - self._cpu_s if process == self._process else 0.0
        self._process, self._cpu_s = process, now_s
        # The system may count a wait for a core that began before the batch.
        took_s = max(took_s, now_s - began_cpu_s)
        self._sums[process % _ROWS] += (samples, took_s + sent_s, now_s - began_cpu_s + sent_s)

    def made(self, workers: int) -> MadeSamples:
        """Return what was made so far; `workers` is the number of workers of the newest loader."""
        samples, worker_s, cpu_s = self._sums.sum(axis=0).tolist()
        return MadeSamples(int(samples), workers, worker_s, cpu_s)
