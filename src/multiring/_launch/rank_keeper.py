"""Run a rank in a process of its own, on behalf of a cluster's worker.

A worker (a thread of Dask's, a task of Spark's) keeps one rank. If the worker stops the rank, or dies in any way, the
rank and every process that it started end.
"""

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping

from multiring._launch.cluster_ranks import ClusterRendezvous, rank_variables
from multiring._launch.commands import environment_of_process
from multiring._launch.cores import cores_of_cpus, threads_per_rank, usable_cpus
from multiring._launch.first_failure import Ended
from multiring._launch.horovod import HorovodPosition, horovod_environment
from multiring._launch.own_modules import module_command
from multiring._launch.pickled_call import CallFiles, pickled_outcome, unnamed_file
from multiring._limits.cpu_limit import cpu_limit
from multiring._limits.processes import refused
from multiring._settings import environment_of, inherited_environment

_STOP_S = 15.0  # the launcher ends the rank within 2 s, and gives up a process that the kernel holds after 10 s more
_KILLED_S = 5.0
_PAUSE_S = 0.5


class RankKeeper:
    """A rank of this worker, as a process.

    Args:
        call: the bytes of `pickled_call`.
        position: the rank's numbers.
        place: where the ranks meet.
        variables: more variables for the rank.
        horovod: whether `import horovod` means multiring in the rank.
    """

    def __init__(
        self,
        call: bytes,
        position: HorovodPosition,
        place: ClusterRendezvous,
        variables: Mapping[str, str],
        *,
        horovod: bool = False,
    ) -> None:
        self.position = position
        self._call, self._place, self._variables, self._horovod = call, place, dict(variables), horovod
        self._stopped = threading.Event()

    def stop(self) -> None:
        """Ask for the rank's end. Any thread may call it; `run` returns soon afterwards."""
        self._stopped.set()

    def run(self, is_wanted: Callable[[], bool] = lambda: True) -> bytes:
        """Start the rank, and return how it ended, for `end_in`: its own pickled outcome, or a pickled Ended.

        The outcome is not unpickled here: it may be large, and this process may lack what it needs.

        Args:
            is_wanted: asked about twice a second; the rank is stopped once it returns False.
        """
        files = CallFiles.create(self._call)
        variables = unnamed_file(json.dumps(self._environment()).encode())
        alive, ours = os.pipe()
        try:
            try:
                process = subprocess.Popen(  # noqa: S603 -- a module of multiring
                    module_command(
                        "multiring._launch.kept_rank", str(os.getpid()), str(alive), str(variables), str(files)
                    ),
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,  # the terminal's Ctrl-C is for the worker, which then stops the rank
                    pass_fds=(alive, variables, *files.descriptors),
                )
            except OSError as error:
                raise refused("the rank's launcher cannot be started", error) from None
            os.close(alive)
            alive = -1
            code = self._wait(process, is_wanted)
            if code is None:
                os.close(ours)
                ours = -1
                code = _ended_within(process, _STOP_S)
            outcome = files.outcome()
            return pickled_outcome(Ended(_ending(code))) if outcome is None else outcome
        finally:
            files.close()
            for descriptor in (alive, ours, variables):
                if descriptor >= 0:
                    os.close(descriptor)

    def _wait(self, process: "subprocess.Popen[bytes]", is_wanted: Callable[[], bool]) -> int | None:
        """Return the exit code of the rank's launcher, or None if the rank is to be stopped."""
        asked_s = time.monotonic()
        while True:
            try:
                return process.wait(0.05)
            except subprocess.TimeoutExpired:
                pass
            if self._stopped.is_set():
                return None
            if time.monotonic() - asked_s >= _PAUSE_S:
                asked_s = time.monotonic()
                if not is_wanted():
                    return None

    def _environment(self) -> dict[str, str]:
        here = inherited_environment() | self._variables
        position = self.position
        threads = threads_per_rank(cores_of_cpus(usable_cpus()), position.local_size, cpu_limit())
        made = environment_of_process(here, threads) | rank_variables(position, self._place)
        made |= environment_of(secret=self._place.secret)
        return made | (horovod_environment(here, position) if self._horovod else {})


def _ended_within(process: "subprocess.Popen[bytes]", patience_s: float) -> int:
    try:
        return process.wait(patience_s)
    except subprocess.TimeoutExpired:
        process.kill()  # the watchdog of the launcher ends the rank
    try:
        return process.wait(_KILLED_S)
    except subprocess.TimeoutExpired:  # the kernel holds it, for example in a call of a file server that is gone
        return -signal.SIGKILL


def _ending(code: int) -> str:
    """Say how a rank ended that left no outcome; `code` is the exit code of its launcher, 128 + n for signal n."""
    number = -code if code < 0 else code - 128
    if number > 0:
        try:
            return f"was killed by {signal.Signals(number).name}"
        except ValueError:
            return f"was killed by signal {number}"
    return f"ended with exit code {code} and without a result"
