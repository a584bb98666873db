"""The launcher of one rank that a cluster's worker keeps.

Usage: `python -m multiring._launch.kept_rank PARENT ALIVE VARIABLES CALL,OUTCOME`.

PARENT is the worker's process. ALIVE is a pipe whose other end the worker holds: its end is the order to stop.
VARIABLES is the descriptor of a file with the rank's environment. CALL and OUTCOME are the descriptors of `CallFiles`.
"""

import contextlib
import json
import os
import selectors
import signal
import sys
from collections.abc import Sequence

from multiring._launch.job import Job
from multiring._launch.job_process import JobProcess, Start
from multiring._launch.leftovers import (
    adopt_orphans,
    children_here,
    end_leftovers,
    job_processes,
    reap_adopted,
    signal_processes,
)
from multiring._launch.pickled_call import FILES, CallFiles, content_of
from multiring._launch.rank_starts import die_with, dying_with
from multiring._launch.watchdog import Watchdog
from multiring._settings import Settings
from multiring.errors import StateError


def main(arguments: Sequence[str]) -> int:
    """Run the rank and return its exit code, 128 + n if signal n ended it.

    Raises:
        StateError: the variables are not those of a rank.
    """
    parent, alive, variables, files = arguments
    die_with(int(parent))
    # This process and its watchdog must not carry the job's variables, by which leftovers are found.
    environment: dict[str, str] = json.loads(content_of(int(variables)))
    settings = Settings.from_environment(environment)
    if settings.rank is None or settings.job is None:
        raise StateError("the variables have no rank or no job: only a worker of a cluster starts this module")
    start = Start(
        name=f"rank {settings.rank}",
        tag=f"[{settings.rank}] ",
        log_files=("", ""),
        command=(sys.executable, "-m", "multiring._launch.function_rank", f"{FILES}{files}"),
        environment=environment,
        prepare=dying_with(os.getpid()),
        descriptors=CallFiles.inherited(files).descriptors,
    )
    return _KeptRankJob(settings.job, settings.rank, int(alive), start).run()


class _KeptRankJob(Job):
    """A job of one process. A watchdog ends what is left behind if this process is killed."""

    def __init__(self, name: str, rank: int, alive: int, start: Start) -> None:
        super().__init__([start], None)
        self._name, self._rank, self._alive = name, rank, alive
        self._is_wanted = True

    def _open(self, stack: contextlib.ExitStack) -> None:
        self._spared = set(children_here())
        adopt_orphans(on=True)
        stack.callback(adopt_orphans, on=False)
        self._watchdog = Watchdog(self._name, self._rank)
        self._spared.add(self._watchdog.pid)
        stack.callback(self._watchdog.dismiss)

    def _born(self, member: JobProcess) -> None:
        self._watchdog.watch(member.pid)

    def _reaped(self, pid: int) -> None:
        self._watchdog.forget(pid)

    def _stop_leftovers(self, known: set[int]) -> None:
        others = set(job_processes(self._name, self._rank)) - known
        signal_processes(others, signal.SIGTERM)

    def _end_leftovers(self, grace_s: float) -> None:
        end_leftovers(self._name, (), grace_s, spared=self._spared, rank=self._rank)

    def _watch_more(self, poll: selectors.BaseSelector) -> None:
        if self._is_wanted:
            poll.register(self._alive, selectors.EVENT_READ, self._on_order)

    def _on_order(self) -> None:
        self._is_wanted = False
        self.was_stopped = True
        self._stop(128 + signal.SIGTERM)

    def _do_more(self) -> None:
        reap_adopted({*self._spared, *(member.pid for member in self._members)})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
