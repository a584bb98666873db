"""The jobs of a study: start, read, stop and reap them, in one loop of the main thread."""

import contextlib
import math
import os
import queue
import selectors
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from multiring._launch.signals import PASSED_ON, StopSignals
from multiring.errors import LaunchError
from multiring.trials.command.trial_job import JobPatterns, TrialCommand, TrialJob
from multiring.trials.command.words import filled
from multiring.trials.messages import (
    Message,
    ObjectiveOutcome,
    PruneAnswer,
    PruneQuestion,
    StudyEnd,
    TrialAssignment,
    TrialReport,
    TrialStop,
)

_TURN_S = 0.5  # the longest time between two looks at the jobs' ends


@dataclass(frozen=True, kw_only=True, slots=True)
class JobPlan:
    """What all jobs of a study have in common."""

    words: tuple[str, ...]  # the program and its arguments, with parameters in braces
    slots: int  # how many ranks may run at a time
    devices: tuple[str, ...] | None  # see TrialCommand
    grace_s: float
    log_dir: Path | None
    patterns: JobPatterns

    def command(self, values: dict[str, Any], slots: Sequence[int], log: str) -> TrialCommand:
        """Return the command of a job with these values; `log` is the name of its log file."""
        return TrialCommand(
            words=tuple(filled(self.words, values)),
            slots=tuple(slots),
            of=self.slots,
            devices=self.devices,
            grace_s=self.grace_s,
            log_dir=self.log_dir,
            log=log,
        )


@dataclass(slots=True, eq=False)
class _Assigned:
    """A trial and its job."""

    told: TrialAssignment
    job: TrialJob
    questions: int = 0
    answers: int = 0
    is_pruned: bool = False
    has_ended: bool = False
    open: set[int] = field(default_factory=set)  # the streams that may have more


class StudyJobs:
    """Runs the trials that the holder of the study assigns, each as a job.

    It stands for the ranks of the study: `send` takes the holder's messages, on any thread; `run` is the main thread's.

    Args:
        plan: what to run.
        answer: takes what a rank says to the holder.
        say: shows a line to the user.
    """

    def __init__(self, plan: JobPlan, answer: Callable[[int, Message], None], say: Callable[[str], None]) -> None:
        self._plan, self._answer, self._say = plan, answer, say
        self._came: queue.SimpleQueue[tuple[int, Message]] = queue.SimpleQueue()
        self._wake_from, self._wake_to = os.pipe()
        for each in (self._wake_from, self._wake_to):
            os.set_blocking(each, False)
        self._running: dict[int, _Assigned] = {}
        self._end: StudyEnd | None = None
        self.signal = 0  # the signal that has ended the study

    def send(self, to: int, message: Message) -> None:
        """Take a message of the holder to a rank."""
        self._came.put((to, message))
        with contextlib.suppress(BlockingIOError, OSError):  # the pipe is full, or the study is over
            os.write(self._wake_to, b".")

    def run(self) -> StudyEnd | None:
        """Run jobs until the study or a signal ends; return the study's end, or None after a signal.

        No job is left afterwards.
        """
        with StopSignals() as signals:
            try:
                while self._end is None and not self.signal:
                    self._turn(signals)
                    self._note_signals(signals)
                if self.signal:
                    self._say(f"{signal.Signals(self.signal).name} received: stopping {len(self._running)} trials")
                self._stop_all(signals)
            finally:
                for each in self._running.values():  # after an internal error only
                    each.job.kill()
        return None if self.signal else self._end

    def close(self) -> None:
        """Close the loop's descriptors, once the holder sends nothing more."""
        os.close(self._wake_from)
        os.close(self._wake_to)

    def _note_signals(self, signals: StopSignals) -> None:
        for number in signals.take():
            if number not in PASSED_ON:
                self.signal = self.signal or number

    def _stop_all(self, signals: StopSignals) -> None:
        for each in self._running.values():
            each.job.stop()
        while self._running:
            self._turn(signals)
            for number in signals.take():
                if number not in PASSED_ON:
                    for each in self._running.values():
                        each.job.stop(at_once=True)

    def _turn(self, signals: StopSignals) -> None:
        with selectors.PollSelector() as poll:
            poll.register(signals.descriptor, selectors.EVENT_READ, None)
            poll.register(self._wake_from, selectors.EVENT_READ, None)
            for each in self._running.values():
                for stream in each.open:
                    poll.register(stream, selectors.EVENT_READ, (each, stream))
            for key, _ in poll.select(_TURN_S):
                if key.data is not None:
                    self._read(*key.data)
        signals.clear()
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_from, 4096)
        for serial, each in list(self._running.items()):
            self._look(serial, each)
        while self._end is None and not self._came.empty():
            self._take(*self._came.get())

    @staticmethod
    def _read(each: _Assigned, stream: int) -> None:
        if not each.job.read(stream):
            each.open.discard(stream)

    def _look(self, serial: int, each: _Assigned) -> None:
        """Tell the holder of a job that has ended, once its reports are read and its questions are answered."""
        if each.job.problem:
            each.job.stop()
        if not each.has_ended and each.job.poll():
            each.has_ended = True
            for stream in list(
                each.open
            ):  # processes that it has left may hold the pipes open, so do not wait for them
                self._read(each, stream)
            each.open.clear()
            each.job.close()
            if each.job.log_problem:
                self._say(f"trial {each.told.number}: {each.job.log_problem}")
        if not each.has_ended or (each.answers < each.questions and not self.signal and self._end is None):
            return
        del self._running[serial]
        if self.signal and each.job.was_stopped:
            return  # it was interrupted, and is tried again when the study goes on
        for rank, outcome in zip(each.told.ranks, self._outcomes(serial, each), strict=True):
            self._answer(rank, outcome)

    def _outcomes(self, serial: int, each: _Assigned) -> list[ObjectiveOutcome]:
        """Return the outcome of each rank of a trial. The holder asks for one of each."""
        count = len(each.told.ranks)
        if each.is_pruned:
            return [ObjectiveOutcome(serial=serial, state="pruned")] * count
        value = each.job.value()
        if value is not None:
            return [ObjectiveOutcome(serial=serial, state="complete", value=value)] * count
        if each.job.code and each.job.last_lines:
            shown = "\n".join(f"    {line}" for line in each.job.last_lines)
            self._say(f"trial {each.told.number}: its last lines on stderr:\n{shown}")
        # The holder takes the reason of "stopped" as it is; that of "failed" would name the rank twice.
        return [ObjectiveOutcome(serial=serial, state="stopped", reason=each.job.problem)] * count

    def _take(self, to: int, message: Message) -> None:
        if isinstance(message, StudyEnd):
            self._end = message
        elif isinstance(message, TrialAssignment):
            if to == message.ranks[0]:
                self._start(message)
        elif isinstance(message, TrialStop | PruneAnswer):
            each = self._running.get(message.serial)
            if each is None or to != each.told.ranks[0]:
                return
            if isinstance(message, TrialStop):
                each.job.stop()
                return
            each.answers += 1
            if message.prunes:
                each.is_pruned = True
                each.job.stop()

    def _start(self, told: TrialAssignment) -> None:
        values = {**told.params, "trial": told.number}
        command = self._plan.command(values, told.ranks, f"trial-{told.number}.log")
        each = _Assigned(
            told, TrialJob(command, self._plan.patterns, lambda step, value: self._report(each, step, value))
        )
        try:
            each.job.start()
        except (OSError, LaunchError) as error:
            for rank in told.ranks:
                reason = f"it cannot be started: {error}"
                self._answer(rank, ObjectiveOutcome(serial=told.serial, state="stopped", reason=reason))
            return
        each.open = set(each.job.streams)
        self._running[told.serial] = each

    def _report(self, each: _Assigned, step: int, value: float) -> None:
        """Tell the holder of a report, and ask whether the trial is pruned."""
        if each.is_pruned:
            return
        each.questions += 1
        first, serial = each.told.ranks[0], each.told.serial
        self._answer(first, TrialReport(serial=serial, step=step, value=value))
        self._answer(first, PruneQuestion(serial=serial, question=each.questions, step=step, ends=True))


def run_together(jobs: Sequence[TrialJob], limit_s: float | None, signals: StopSignals) -> None:
    """Run jobs to their ends, on the main thread; a signal or the time limit stops them.

    Raises:
        LaunchError: a log file cannot be written.
        OSError: a job cannot be started.
    """
    until_s = math.inf if limit_s is None else time.monotonic() + limit_s
    streams: dict[int, TrialJob] = {}
    started: list[TrialJob] = []
    try:
        for job in jobs:
            job.start()
            started.append(job)
            streams.update(dict.fromkeys(job.streams, job))
        while running := [job for job in jobs if not job.poll()]:
            _read_ready(signals, streams)
            late = time.monotonic() > until_s
            problem = f"its time limit of {limit_s} s has passed" if late else ""
            _stop_for(running, "a signal has ended the study" if signals.have_asked_for_end else problem)
        for stream, job in streams.items():
            job.read(stream)
    finally:
        for job in started:
            job.kill()
            job.close()


def _read_ready(signals: StopSignals, streams: dict[int, TrialJob]) -> None:
    """Wait for output or a signal, and read it; drop the streams that have ended."""
    with selectors.PollSelector() as poll:
        for descriptor in (signals.descriptor, *streams):
            poll.register(descriptor, selectors.EVENT_READ)
        ready = [key.fd for key, _ in poll.select(_TURN_S)]
    signals.clear()
    for stream in ready:
        if stream in streams and not streams[stream].read(stream):
            del streams[stream]


def _stop_for(jobs: Sequence[TrialJob], problem: str) -> None:
    for job in jobs if problem else ():
        job.problem = job.problem or problem
        job.stop()
