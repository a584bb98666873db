"""Ctrl-C for a thread that waits in native code: Python would hear of it only when the wait has ended.

The signal's byte comes by the wakeup descriptor, to a thread; what is in flight then fails, the wait ends, and Python
raises KeyboardInterrupt. A program with a handler of its own for SIGINT keeps what it has in flight.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from types import FrameType
from typing import Any

from multiring.frontend.requests.service import cancel_all

_PATIENCE_S = 0.2  # for what ends by itself, or a handler that Python can run


class _Now:
    """The descriptor of this process, once there is one."""

    pid = 0
    has_cancelled = False
    handlers: tuple[object, ...] = (signal.default_int_handler,)  # which leave it to this module


def fail_at_interrupts(undisturbed: Collection[str] = ()) -> None:
    """Have Ctrl-C fail the requests in flight, from now on; nothing happens on another thread than the main one.

    Args:
        undisturbed: files of Python's whose functions make the framework's errors for native code. A KeyboardInterrupt
            that is raised there comes out as whatever that code makes of it (pybind11: a RuntimeError); so it is
            raised where the native code has returned.
    """
    _Now.has_cancelled = False  # of a job that was joined before
    if threading.current_thread() is not threading.main_thread() or _Now.pid == os.getpid():
        return
    if undisturbed and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        handler = _handler(undisturbed)
        _Now.handlers = (signal.default_int_handler, handler)
        signal.signal(signal.SIGINT, handler)
    read, write = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(write, False)
    former = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    _Now.pid = os.getpid()
    threading.Thread(target=_watch, args=(read, former), name="multiring-requests-interrupts", daemon=True).start()


def has_cancelled() -> bool:
    """Return whether Ctrl-C has failed what was in flight since the job was joined, and this was asked last.

    For whoever is told of that failure where another library has dropped the KeyboardInterrupt.
    """
    found, _Now.has_cancelled = _Now.has_cancelled, False
    return found


def _handler(undisturbed: Collection[str]) -> Callable[[int, FrameType | None], None]:
    def handle(number: int, frame: FrameType | None) -> None:
        if frame is None or frame.f_code.co_filename not in undisturbed:
            signal.default_int_handler(number, frame)
        former = sys.getprofile()

        def told_later(here: FrameType, event: str, argument: Any) -> None:  # noqa: ARG001 -- a profile function's
            if here.f_code.co_filename not in {*undisturbed, __file__}:
                sys.setprofile(former)
                signal.default_int_handler(number, here)

        sys.setprofile(told_later)

    return handle


def _watch(read: int, former: int) -> None:
    while True:
        numbers = os.read(read, 64)
        if former >= 0:  # whoever had it before
            with suppress(OSError):
                os.write(former, numbers)
        if signal.SIGINT in numbers and signal.getsignal(signal.SIGINT) in _Now.handlers:
            time.sleep(_PATIENCE_S)
            _Now.has_cancelled = True  # before somebody is told of the failure
            _Now.has_cancelled = cancel_all() > 0
