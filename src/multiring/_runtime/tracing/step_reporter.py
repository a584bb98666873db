"""The thread that reports a rank's steps to its launcher, for `multiring run --record` and `--page`.

The training's threads only update `STEPS` and record events, as they always do. This thread reads both, at most once a
second. A report that the launcher cannot take at once is dropped: the next one has the same sums and more.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from multiring._limits.processes import start_thread
from multiring._native import Context
from multiring._runtime.job.membership import Membership
from multiring._runtime.tracing.event_log import EventReader
from multiring._runtime.tracing.wait_split import Rows, ended_after, rows_of, split_of
from multiring._steps.step_counters import STEPS, StepMark
from multiring._steps.step_report import RailTotals, StepReport, encode_report

_PERIOD_S, _LONGEST_PERIOD_S = 1.0, 10.0
_AGE_S = 600.0  # the period grows by a second for each of these, so that the record of a long job stays small
_STEP_CPU_S = 15e-6  # the CPU time that reports may take for each step, so slow steps are reported less often,
_SLOWEST_PERIOD_S = 30.0  # but at least as often as this
_MOST_ROWS = 1 << 16
_END_S = 2.0
_log = logging.getLogger("multiring")
_NOTHING = np.empty((0, 8), np.int64)


class StepReporter:
    """Reports the steps of this rank.

    Args:
        context: the native context, for its rails.
        events: the events of this rank's operations and waits.
        send: takes a report for the launcher; it does not block.
        membership: the ranks of the job.
    """

    def __init__(
        self, context: Context, events: EventReader, send: Callable[[bytes], object], membership: Membership
    ) -> None:
        self._context, self._events, self._send = context, events, send
        self.membership = membership
        self._rows: Rows = _NOTHING
        self._from: StepMark | None = None
        self._sums = self._last = StepReport()
        self._dropped = 0
        self._cpu_s = 0.0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="multiring steps", daemon=True)

    def start(self) -> None:
        """Start the thread.

        Raises:
            LaunchError: the kernel refuses the thread.
        """
        STEPS.is_read = True
        start_thread(self._thread, "this rank cannot start the thread that reports its steps")

    def stop(self) -> None:
        """Send a last report. The native context must be open yet."""
        STEPS.is_read = False
        self._is_over.set()
        if self._thread.is_alive():
            self._thread.join(_END_S)

    def _run(self) -> None:
        began_s = time.monotonic()
        is_over = False
        while not is_over:
            is_over = self._is_over.wait(self._period_s(time.monotonic() - began_s))
            try:
                self._send(encode_report(self.report()))
            except Exception:  # noqa: BLE001 -- the training goes on
                _log.exception("this rank reports its steps no more")
                return
            self._cpu_s = time.thread_time()

    def _period_s(self, age_s: float) -> float:
        """Return the time to the next report."""
        by_age_s = min(_LONGEST_PERIOD_S, _PERIOD_S + age_s / _AGE_S)
        sums, last = self._sums, self._last
        steps, cpu_s = sums.steps - last.steps, self._cpu_s - last.writer_cpu_s
        if not steps:
            return by_age_s
        by_cost_s = cpu_s / _STEP_CPU_S * (sums.wall_s - last.wall_s) / steps
        self._last = replace(sums, writer_cpu_s=self._cpu_s)
        return max(by_age_s, min(_SLOWEST_PERIOD_S, by_cost_s))

    def report(self) -> StepReport:
        """Return the report up to the end of the newest step. Only one thread may call this."""
        mark, begin, step, metrics = STEPS.mark, STEPS.begin, STEPS.step, dict(STEPS.metrics)
        STEPS.wants_metrics = True
        fresh = self._events.take()
        rows = np.concatenate([self._rows, rows_of(fresh)]) if fresh else self._rows
        if mark is not None and mark != self._from:
            begin = begin if self._from is None or self._from.window != mark.window else self._from
            if begin is not None and begin.window == mark.window:
                self._add(rows, begin, mark)
            self._from = mark
            rows = ended_after(rows, mark.at_s)
        self._dropped += max(0, len(rows) - _MOST_ROWS)
        self._rows = rows[-_MOST_ROWS:]
        return replace(
            self._sums,
            generation=self.membership.number,
            rank_now=self.membership.rank,
            ranks=self.membership.size,
            step=step,
            idle_s=None if mark is None else time.monotonic() - mark.at_s,
            writer_cpu_s=self._cpu_s,
            metrics=metrics,
            rails=self._rails(),
            dropped=self._dropped,
        )

    def _add(self, rows: Rows, begin: StepMark, end: StepMark) -> None:
        split = split_of(rows, begin.at_s, end.at_s)
        sums = self._sums
        self._sums = replace(
            sums,
            steps=sums.steps + end.steps - begin.steps,
            wall_s=sums.wall_s + end.at_s - begin.at_s,
            input_s=sums.input_s + end.input_s - begin.input_s,
            peers_s=sums.peers_s + split.peers_s,
            exposed_s=sums.exposed_s + split.exposed_s,
            collective_s=sums.collective_s + split.collective_s,
            collective_bytes=sums.collective_bytes + split.size_bytes,
        )

    def _rails(self) -> tuple[RailTotals, ...]:
        found: dict[int, list[float]] = {}
        for _, rail, is_up, carried, busy_s in self._context.rails():
            sums = found.setdefault(rail, [0, 0, 0, 0.0])
            for place, value in enumerate((is_up, 1, carried, busy_s)):
                sums[place] += value
        return tuple(
            RailTotals(rail=rail, up=int(up), connections=int(count), carried_bytes=int(carried), busy_s=busy_s)
            for rail, (up, count, carried, busy_s) in sorted(found.items())
        )
