"""The keeper of a job: it runs the job in a child process, and outlives the launcher that the user has started.

The child is the launcher of a job without a keeper: it starts the ranks, decides about losses and ends all processes.
The keeper stands between it and the user: it passes on output and signals, and gives the exit code to the launcher. If
the launcher is killed, the job goes on for a stated time, and a new launcher may come. If none does, the job ends like
one that got SIGTERM. If the keeper or its child is killed, the job ends at once.
"""

import contextlib
import os
import selectors
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import NoReturn

from multiring._launch.keeper_address import KeptJob, owner_of, receive, send
from multiring._launch.kept_output import KeptOutput, outputs
from multiring._launch.rank_starts import dying_with
from multiring._launch.signals import PASSED_ON, StopSignals

_GUEST_S = 5.0  # how long a process that has connected may take to say what it wants
_MOST_GUESTS = 16
_WRITE_S = 5.0  # how long the last output may take once the job has ended
_FAILED = 1


class JobKeeper:
    """Keeps one job.

    Args:
        listener: where new launchers come.
        link: the connection to the launcher that has started this process.
        patience_s: how long the job goes on without a launcher.
        command: the command that the user has typed.
    """

    def __init__(self, listener: socket.socket, link: socket.socket, patience_s: float, command: str) -> None:
        self._listener = listener
        self._link: socket.socket | None = link
        self._launcher: int | None = owner_of(link)[0]
        self._patience_s = patience_s
        self._command = command
        self._outputs: list[KeptOutput] = []
        self._guests: dict[socket.socket, float] = {}  # who has connected -> until when
        self._child = 0
        self._code: int | None = None  # the job's exit code
        self._lost_s = self._ended_s = 0.0  # when the launcher was lost, and when the job ended
        self._write_until = 0.0  # when the last output is given up, once the job has ended
        self._was_asked = False  # the launcher was asked to end
        self._drops_output = False  # it was asked again, or after the job: it does not wait for a reader
        self._is_told = self._is_taken = False  # the exit code was sent to the launcher, which ends with it now
        self._ends = ""  # why the job takes no launcher any more

    def run(self, job: Callable[[], int]) -> None:
        """Run `job`, which returns an exit code, in a child process, until a launcher has the code or none comes."""
        self._listener.listen(_MOST_GUESTS)
        self._outputs = outputs()
        self._start(job)
        with contextlib.ExitStack() as stack:
            self._signals = stack.enter_context(StopSignals())
            self._listener.setblocking(False)
            if self._link is not None:
                self._link.setblocking(False)
            self._say(
                f"the job survives its launcher (pid {self._launcher}) by {self._patience_s:g} s: the same command in "
                f"this folder adopts it. Process {os.getpid()} keeps it"
            )
            while not self._is_done():
                self._turn()
            self._listener.close()  # the same command may start the next job

    # -- the job's process

    def _start(self, job: Callable[[], int]) -> None:
        keeper = os.getpid()
        self._child = os.fork()
        if self._child == 0:
            self._be_child(job, keeper)
        for output in self._outputs:
            output.begin()

    def _be_child(self, job: Callable[[], int], keeper: int) -> NoReturn:
        code = _FAILED
        try:
            dying_with(keeper)()
            first, last = self._outputs[0].writing, self._outputs[-1].writing
            os.dup2(first, 1)
            os.dup2(last, 2)
            for output in self._outputs:
                os.close(output.reading)
                os.close(output.writing)
            self._listener.close()
            if self._link is not None:
                self._link.close()
            code = job()
        except SystemExit as end:  # of a wrong command line
            code = end.code if isinstance(end.code, int) else _FAILED
        except BaseException:  # noqa: BLE001 -- this process must not unwind the keeper's stack
            traceback.print_exc()
        finally:
            with contextlib.suppress(OSError, ValueError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def _reap(self) -> None:
        if self._code is not None:
            return
        pid, status = os.waitpid(self._child, os.WNOHANG)
        if pid == 0:
            return
        code = os.waitstatus_to_exitcode(status)
        self._code = code if code >= 0 else 128 - code
        for output in self._outputs:
            output.drain()
            output.close()
        if code < 0:
            self._say(f"the process that ran the job (pid {pid}) was killed by {signal.Signals(-code).name}")
        self._ended_s = time.monotonic()
        self._write_until = self._ended_s + _WRITE_S
        if self._link is None:
            self._say(
                f"the job has ended with exit code {self._code}, without a launcher"
                + ("" if self._ends else f": for {self._patience_s:g} s, the same command in this folder gets the code")
            )

    # -- the loop

    def _is_done(self) -> bool:
        if self._code is None:
            return False
        if self._is_taken:
            # A launcher that is killed before it ends with the code would be started again, and needs the code then.
            return self._link is None
        is_written = all(output.is_written for output in self._outputs)
        if self._link is not None:
            # A launcher waits for a slow reader as long as without a keeper: until a signal comes.
            if (is_written or self._drops_output) and not self._is_told:
                self._is_told = True
                send(self._link, code=self._code)
            return False  # a launcher that is killed before it has the code leaves the code to the next one
        if self._ends:
            return is_written or time.monotonic() >= self._write_until
        return time.monotonic() >= self._waits_until

    @property
    def _waits_until(self) -> float:
        """When a job without a launcher ends, or, once it has ended, when its exit code is kept no longer."""
        return max(self._lost_s, self._ended_s) + self._patience_s

    def _turn(self) -> None:
        now = time.monotonic()
        with selectors.PollSelector() as poll:
            poll.register(self._signals.descriptor, selectors.EVENT_READ, self._signals.clear)
            poll.register(self._listener, selectors.EVENT_READ, self._accept)
            if self._link is not None:
                poll.register(self._link, selectors.EVENT_READ, self._hear_launcher)
            for guest in self._guests:
                poll.register(guest, selectors.EVENT_READ, partial(self._hear_guest, guest))
            for output in self._outputs:
                output.watch(poll, has_launcher=self._link is not None)
            wake = self._wake_at()
            for key, _ in poll.select(None if wake is None else max(0.0, wake - now)):
                key.data()
        self._act()

    def _wake_at(self) -> float | None:
        times = [output.acts_at for output in self._outputs if self._link is not None]
        times += list(self._guests.values())
        if self._link is None:
            times.append(self._waits_until if not self._ends else None)
        if self._code is not None and self._ends:
            times.append(self._write_until)
        return min((at for at in times if at is not None), default=None)

    def _act(self) -> None:
        now = time.monotonic()
        self._reap()
        for number in self._signals.take():
            if self._link is None and number not in PASSED_ON:
                self._end(f"process {os.getpid()}, which keeps the job, got {signal.Signals(number).name}", number)
            else:
                self._signal(number)
        for guest in [guest for guest, until in self._guests.items() if now >= until]:
            self._forget(guest)
        for output in self._outputs:
            if why := output.act(has_launcher=self._link is not None):
                self._say(f"the output is cut off: {why}")
        if self._link is None and not self._ends and self._code is None and now >= self._waits_until:
            self._end(f"no new launcher came within {self._patience_s:g} s: the job ends", signal.SIGTERM)

    def _end(self, why: str, number: int) -> None:
        self._ends = why
        self._say(why)
        self._signal(number)

    def _signal(self, number: int) -> None:
        if self._code is None:
            os.kill(self._child, number)

    def _say(self, text: str) -> None:
        self._outputs[-1].say(text)

    # -- launchers

    def _hear_launcher(self) -> None:
        while self._link is not None:
            try:
                message, _ = receive(self._link)
            except BlockingIOError:
                return
            if message is None:
                self._lose_launcher()
            elif isinstance(number := message.get("signal"), int):
                if number not in PASSED_ON:
                    self._drops_output |= self._was_asked or self._code is not None
                    self._was_asked = True
                self._signal(number)
            elif "taken" in message:
                self._is_taken = True

    def _lose_launcher(self) -> None:
        if self._link is not None:
            self._link.close()
        lost, self._link, self._launcher, self._lost_s = self._launcher, None, None, time.monotonic()
        self._is_told = self._was_asked = self._drops_output = False
        if self._is_taken:
            return
        if self._code is not None:
            self._say(
                f"the launcher (pid {lost}) was lost before it had the job's exit code, {self._code}: for "
                f"{self._patience_s:g} s, the same command in this folder gets the code"
            )
            return
        self._say(
            f"the launcher (pid {lost}) was lost. The ranks go on for {self._patience_s:g} s; until then the same "
            f"command in this folder adopts them, and `kill {os.getpid()}` ends them"
        )

    def _accept(self) -> None:
        try:
            guest, _ = self._listener.accept()
        except OSError:
            return
        # A launcher that has ended has closed its connection before anybody could start the next one.
        self._hear_launcher()
        if self._is_taken and self._link is None:
            guest.close()
            return
        if owner_of(guest)[1] != os.getuid() or len(self._guests) >= _MOST_GUESTS:
            guest.close()
            return
        guest.setblocking(False)
        self._guests[guest] = time.monotonic() + _GUEST_S
        job = KeptJob(os.getpid(), self._launcher, self._command, self._ends, self._code is not None)
        send(guest, **job.told())

    def _forget(self, guest: socket.socket) -> None:
        self._guests.pop(guest, None)
        guest.close()

    def _hear_guest(self, guest: socket.socket) -> None:
        if guest not in self._guests:
            return
        try:
            message, descriptors = receive(guest, 2)
        except BlockingIOError:
            return
        if message is None or "adopt" not in message or len(descriptors) != 2:
            self._forget(guest)
        elif self._link is not None or self._ends:
            send(guest, refused=True)
            self._forget(guest)
        else:
            self._take(guest, descriptors)
        for descriptor in descriptors:
            os.close(descriptor)

    def _take(self, guest: socket.socket, descriptors: list[int]) -> None:
        """Have a new launcher."""
        del self._guests[guest]
        self._link, self._launcher = guest, owner_of(guest)[0]
        alone_s = time.monotonic() - self._lost_s
        for output, descriptor in zip(self._outputs, descriptors, strict=False):
            output.turn_to(descriptor)
        if len(self._outputs) == 1:
            os.dup2(descriptors[1], 2)
        send(guest, adopted=True)
        has = "ran" if self._code is None else "has ended, and ran or waited"
        self._say(f"this launcher has adopted the job, which {has} for {alone_s:.1f} s without one")
