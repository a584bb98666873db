"""Measure a training for its balance line, from the loader's workers and the runtime's events."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from multiring._limits.rank_cores import cores_of_rank
from multiring._runtime import event_reader, is_initialized
from multiring._runtime.tracing.wait_split import rows_of, split_of
from multiring.data.balance.decision import Balance, TrainingCounts, balance_of
from multiring.data.feeding.loader import Loader
from multiring.errors import StateError

Gather = Callable[[TrainingCounts], list[TrainingCounts]]


class BalanceWatch:
    """Measures a training from now on; `finish` returns the bottleneck.

    Args:
        loader: the training's loader.
        host_ranks: the number of ranks that share this host's cores.
        gather: called with this rank's measurements; returns those of all ranks. Every rank calls it in `finish`.
    """

    def __init__(self, loader: Loader, host_ranks: int = 1, gather: Gather | None = None) -> None:
        self._loader, self._gather = loader, gather
        self._cores = cores_of_rank(host_ranks)
        self._events = event_reader() if is_initialized() else None
        self._totals: dict[str, float] = defaultdict(float)
        self._began: dict[str, float] | None = self._now()
        loader.attend_by(self._look)

    def _now(self) -> dict[str, float]:
        loader = self._loader
        return {
            "wall": time.monotonic(),
            "cpu": time.process_time(),
            "waited": loader.waited_s,
            "steps": loader.batches,
            **{f"spent {name}": each for name, each in loader.spent.items()},
        }

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude a `with` block, for instance an evaluation, from the measurements."""
        self._stop()
        try:
            yield
        finally:
            if self._events is not None:
                self._events.take()
            self._began = self._now()

    def _stop(self) -> None:
        if self._began is None:
            raise StateError("balance: already paused or finished; pause and finish only while measuring")
        self._look()
        for name, value in self._now().items():
            self._totals[name] += value - self._began.get(name, 0.0)
        self._began = None

    def _look(self) -> None:
        """Evaluate the events since the last call.

        Calls must be frequent: the runtime keeps only the newest events.
        """
        if self._events is None or self._began is None:
            return
        split = split_of(rows_of(self._events.take()))
        self._totals["wire"] += split.collective_s
        self._totals["exposed"] += split.exposed_s
        self._totals["peers"] += split.peers_s

    def counted(self) -> TrainingCounts:
        """Return this rank's measurements."""
        totals = self._totals
        return TrainingCounts(
            wall_s=totals["wall"],
            steps=max(1, int(totals["steps"])),
            waited_s=totals["waited"],
            wire_s=totals["wire"],
            exposed_s=totals["exposed"],
            peers_s=totals["peers"],
            cpu_s=totals["cpu"],
            workers=self._loader.workers,
            cores=self._cores,
            spent={
                name.removeprefix("spent "): float(each) for name, each in totals.items() if name.startswith("spent ")
            },
        )

    def finish(self) -> Balance:
        """Return the bottleneck of the training.

        With several ranks, every rank must call this.

        Raises:
            StateError: the measurement is paused or finished, or there was no step.
        """
        self._stop()
        self._loader.attend_by(None)
        if not self._totals["steps"]:
            raise StateError("balance: the loader has not yielded a batch; finish after the first step")
        own = self.counted()
        return balance_of([own] if self._gather is None else self._gather(own))
