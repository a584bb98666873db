"""Run something in a process that the kernel ends with everything it started, however the caller ends.

The process is the pid 1 of a PID namespace: with it, the kernel kills and reaps all that came of it. Without that,
a killed lab's processes would wait to be reaped by this machine's init, and some take their time.
"""

import contextlib
import os
import pickle
import select
import signal
import sys
from collections.abc import Callable

from multiring.errors import MultiringError, UnsupportedError
from multiring.lab.namespaces import Space, die_with_parent, inside_new
from multiring.launch.signals import StopSignals

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_READ_BYTES = 1 << 16


def run_in_pid_namespace(work: Callable[[], int]) -> int:
    """Return what `work` returns, having run it in such a process; SIGINT, SIGTERM and SIGHUP are handed on.

    They are blocked there until `work` unblocks them: they would be lost on a pid 1 that does not handle them yet.
    Its process sees this one's files, and other processes by numbers of its own. Main thread only.

    Raises:
        MultiringError: what `work` raised.
        UnsupportedError: no such process may be made.
    """
    answer, answering = os.pipe()
    alive, living = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    with StopSignals() as signals:
        former = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
        try:
            with inside_new(Space.PID):
                pid = os.fork()
                if pid == 0:
                    os.close(answer)
                    os.close(living)
                    _be_first(work, alive, answering)
        except OSError as error:
            os.close(answer)
            os.close(living)
            raise UnsupportedError(f"cannot make a PID namespace: {error.strerror}") from None
        finally:
            os.close(answering)
            os.close(alive)
            signal.pthread_sigmask(signal.SIG_SETMASK, former)
        try:
            said = _hear(pid, answer, signals)
            _, status = os.waitpid(pid, 0)
        except BaseException:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise
        finally:
            os.close(answer)
            os.close(living)
    if said:
        raised: MultiringError = pickle.loads(said)  # noqa: S301 -- from our own child
        raise raised
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _hear(pid: int, answer: int, signals: StopSignals) -> bytes:
    """Return what the process says until it ends; hand signals on meanwhile."""
    said = b""
    poll = select.poll()
    for descriptor in (answer, signals.descriptor):
        poll.register(descriptor, select.POLLIN)
    while True:
        ready = {descriptor for descriptor, _ in poll.poll()}
        signals.clear()
        for number in signals.take():
            os.kill(pid, number)
        if answer in ready:
            words = os.read(answer, _READ_BYTES)
            if not words:
                return said
            said += words


def _be_first(work: Callable[[], int], alive: int, answering: int) -> None:
    """Be the pid 1; never returns: in this process the caller's stack must not be unwound."""
    code = 1
    try:
        die_with_parent(signal.SIGKILL)
        os.set_blocking(alive, False)
        with contextlib.suppress(BlockingIOError):
            os.read(alive, 1)
            os._exit(1)  # end of file: the parent died before the kernel was told
        os.setsid()  # the terminal's Ctrl-C comes by way of the parent, once
        try:
            code = work()
        except MultiringError as error:
            os.write(answering, pickle.dumps(error))
    except BaseException:  # noqa: BLE001 -- a bug, to be shown as Python shows it; the finally ends the process
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
