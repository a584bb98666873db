"""Handle Ctrl-C while the main thread waits in native code. Python would handle it only after the wait has ended.

A thread reads the signal's number from the wakeup descriptor and makes the requests in flight fail. The wait then ends,
and Python raises KeyboardInterrupt. If the program has its own handler for SIGINT, the requests are left alone.
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

from multiring._frontend.requests.service import cancel_all

_PATIENCE_S = 0.2  # time for requests to end by themselves, or for Python to run the handler


class _Now:
    """The state of this process."""

    pid = 0  # the process that has the wakeup descriptor
    has_cancelled = False
    handlers: tuple[object, ...] = (signal.default_int_handler,)  # whether this module handles Ctrl-C with this state


def fail_at_interrupts(undisturbed: Collection[str] = ()) -> None:
    """Make Ctrl-C fail the requests in flight from now on.

    The call has no effect outside the main thread.

    Args:
        undisturbed: Python files whose functions build the framework's errors for native code. Native code would turn
            a KeyboardInterrupt from these files into another error (pybind11: a RuntimeError). The KeyboardInterrupt is
            therefore raised after the native code has returned.
    """
    _Now.has_cancelled = False  # a mark of an earlier job may be left
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
    """Return whether Ctrl-C has failed requests since the last call.

    Requests of an earlier job do not count. The function helps a caller that gets such a failure after another library
    has dropped the KeyboardInterrupt.
    """
    found, _Now.has_cancelled = _Now.has_cancelled, False
    return found


def _handler(undisturbed: Collection[str]) -> Callable[[int, FrameType | None], None]:
    def handle(number: int, frame: FrameType | None) -> None:
        if frame is None or frame.f_code.co_filename not in undisturbed:
            signal.default_int_handler(number, frame)
        former = sys.getprofile()

        def told_later(here: FrameType, event: str, argument: Any) -> None:  # noqa: ARG001 -- Python passes it
            if here.f_code.co_filename not in {*undisturbed, __file__}:
                sys.setprofile(former)
                signal.default_int_handler(number, here)

        sys.setprofile(told_later)

    return handle


def _watch(read: int, former: int) -> None:
    while True:
        numbers = os.read(read, 64)
        if former >= 0:  # pass the signals on to the previous descriptor
            with suppress(OSError):
                os.write(former, numbers)
        if signal.SIGINT in numbers and signal.getsignal(signal.SIGINT) in _Now.handlers:
            time.sleep(_PATIENCE_S)
            _Now.has_cancelled = True  # set first, because a caller may ask as soon as its request fails
            _Now.has_cancelled = cancel_all() > 0
