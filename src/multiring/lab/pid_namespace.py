"""Run a function in a process that ends together with all its descendants.

The kernel ends these processes, even if the caller is killed.

The process is the pid 1 of a PID namespace. When it ends, the kernel kills and reaps all its descendants. Without the
namespace, the killed processes of a lab would wait until this machine's init reaps them, which can take long.
"""

import contextlib
import os
import pickle
import select
import signal
import sys
from collections.abc import Callable

from multiring._launch.signals import StopSignals
from multiring.errors import MultiringError, UnsupportedError
from multiring.lab.namespaces import NamespaceKind, die_with_parent, inside_new

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_READ_BYTES = 1 << 16


def run_in_pid_namespace(work: Callable[[], int]) -> int:
    """Run `work` as pid 1 of a new PID namespace and return its result.

    SIGINT, SIGTERM and SIGHUP are forwarded to the process. They are blocked there until `work` unblocks them, because
    a pid 1 without handlers would lose them. The process sees the same files as this one, but has its own process IDs.
    Call the function from the main thread only.

    Raises:
        MultiringError: the error that `work` raised.
        UnsupportedError: the system does not allow a new PID namespace.
    """
    answer, answering = os.pipe()
    alive, living = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    with StopSignals() as signals:
        former = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
        try:
            with inside_new(NamespaceKind.PID):
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
        raised: MultiringError = pickle.loads(said)  # noqa: S301 -- from this process's child
        raise raised
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _hear(pid: int, answer: int, signals: StopSignals) -> bytes:
    """Return the bytes that the process writes until it ends, and forward signals to the process."""
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
    """Run `work` as pid 1. The function never returns, because it must not unwind the caller's stack."""
    code = 1
    try:
        die_with_parent(signal.SIGKILL)
        os.set_blocking(alive, False)
        with contextlib.suppress(BlockingIOError):
            os.read(alive, 1)
            os._exit(1)  # end of file: the parent died before prctl took effect
        os.setsid()  # the parent forwards the terminal's Ctrl-C, so receive it only once
        try:
            code = work()
        except MultiringError as error:
            os.write(answering, pickle.dumps(error))
    except BaseException:  # noqa: BLE001 -- an internal error: print it like Python does; `finally` ends the process
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
