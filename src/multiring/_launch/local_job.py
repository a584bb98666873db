"""A job of ranks on this host, which leaves no process behind."""

import contextlib
import os
import selectors
import signal
import time
from collections.abc import Sequence

from multiring._launch.job import Job, JobOptions
from multiring._launch.job_process import JobProcess, Start, text_of
from multiring._launch.leftovers import (
    adopt_orphans,
    children_here,
    end_leftovers,
    job_processes,
    reap_adopted,
    signal_processes,
)
from multiring._launch.live_record import JobRecorder
from multiring._launch.rank_reports import ANY, RankReports, catches, lives, name_of
from multiring._launch.watchdog import Watchdog
from multiring._settings import JobNews

LONG_S = 60.0  # a job that ran this long counts as having made progress, even without a report


class LocalJob(Job):
    """A job of ranks on this host. A watchdog process ends leftover processes if this process is killed.

    Args:
        name: the job's name.
        starts: the ranks.
        options: the job's options.
        reports: the address at which ranks report, as in MULTIRING_REPORTS.
        said: messages to print at the start of the job.
    """

    def __init__(
        self, name: str, starts: Sequence[Start], options: JobOptions, reports: str, said: Sequence[str]
    ) -> None:
        super().__init__(starts, options.log_dir, options.grace_s)
        self._name = name
        self._reports_at = reports
        self._said = said
        self._held_back: dict[int, set[int]] = {}  # first process of a rank -> the signals to send after the rank joins
        self._began_s = time.monotonic()
        self._recorder = JobRecorder(options.record, len(starts), [(os.uname().nodename, len(starts))])

    @property
    def made_progress(self) -> bool:
        """Whether the ranks reported progress (a step, a save), or ran for a minute; valid after the job's end."""
        return JobNews.PROGRESS.value in self._reports.news or time.monotonic() - self._began_s >= LONG_S

    def _open(self, stack: contextlib.ExitStack) -> None:
        self._reports = RankReports(self._reports_at)
        stack.callback(self._reports.close)
        for each in self._said:
            self._say(each)
        self._spared = set(children_here())  # children that this process had before the job
        adopt_orphans(on=True)
        stack.callback(adopt_orphans, on=False)
        self._watchdog = Watchdog(self._name)
        self._spared.add(self._watchdog.pid)
        stack.callback(self._watchdog.dismiss)

    def _born(self, member: JobProcess) -> None:
        self._watchdog.watch(member.pid)

    def _reaping(self, pid: int) -> None:
        del pid
        self._reports.hear()  # the last report of the process; without the process, its session is unknown

    def _reaped(self, pid: int) -> None:
        self._watchdog.forget(pid)

    def _stop_leftovers(self, known: set[int]) -> None:
        signal_processes(set(job_processes(self._name)) - known, signal.SIGTERM)

    def _end_leftovers(self, grace_s: float) -> None:
        end_leftovers(self._name, (), grace_s, spared=self._spared)

    def _watch_more(self, poll: selectors.BaseSelector) -> None:
        poll.register(self._reports.descriptor, selectors.EVENT_READ, self._reports.hear)

    def _do_more(self) -> None:
        self._reports.hear()
        self._take_steps()
        self._recorder.look(self._members)
        reap_adopted({*self._spared, *(member.pid for member in self._members)})
        for first, numbers in list(self._held_back.items()):
            if self._ranks_in(first):
                del self._held_back[first]
                self._signal_ranks(first, numbers)

    def _lost_by(self, member: JobProcess) -> set[JobProcess] | None:
        self._reports.hear()
        lost = self._reports.lost_by(member.pid)
        if ANY in lost or (not lost and member.is_consequence):
            return None
        return {each for each in self._members if each.pid in lost}

    def _pass_on(self, number: int) -> None:
        """Signal only the rank processes. The signal would kill their workers and helpers."""
        waiting = []
        for member in self._running():
            if self._ranks_in(member.pid):
                self._signal_ranks(member.pid, {number})
            elif catches(member.pid, number):
                signal_processes([member.pid], number)
            else:
                self._held_back.setdefault(member.pid, set()).add(number)
                waiting.append(member)
        told = f"{name_of(number)} received, and handed on to the ranks"
        later = f"; {text_of(waiting)}: as soon as multiring.init() is called there" if waiting else ""
        self._say(told + later)

    def _ranks_in(self, first: int) -> list[int]:
        return [pid for pid in self._reports.rank_processes.get(first, ()) if lives(pid)]

    def _signal_ranks(self, first: int, numbers: set[int]) -> None:
        for number in numbers:
            signal_processes(self._ranks_in(first), number)

    def _take_steps(self) -> None:
        """Record what the ranks have reported of their steps."""
        reports = self._reports.take_steps()
        for rank, member in enumerate(self._members if reports else ()):
            if member.pid in reports:
                self._recorder.take(rank, reports[member.pid])

    def _say(self, text: str) -> None:
        super()._say(text)
        self._recorder.say(text)

    def _conclude(self) -> None:
        self._reports.hear()
        self._take_steps()
        self._recorder.look(self._members)
        if self._code or len(self._members) < 2:  # a rank that failed may not have reached multiring.init()
            return
        if not self._reports.news:
            self._say(
                f"none of the {len(self._members)} ranks joined the job: each of them seems to have run the whole "
                "program on its own. Call multiring.init() in the program, directly or through a library; or use -n 1"
            )
