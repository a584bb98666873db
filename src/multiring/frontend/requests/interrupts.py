"""Ctrl-C for a thread that waits in native code: Python would hear of it only when the wait has ended.

The signal's byte comes by the wakeup descriptor, to a thread; what is in flight then fails, the wait ends, and Python
raises KeyboardInterrupt. A program with a handler of its own for SIGINT keeps what it has in flight.
"""

import os
import signal
import threading
import time
from contextlib import suppress

from multiring.frontend.requests.service import cancel_all

_PATIENCE_S = 0.2  # for what ends by itself, or a handler that Python can run


class _Now:
    """The descriptor of this process, once there is one."""

    pid = 0


def fail_at_interrupts() -> None:
    """Have Ctrl-C fail the requests in flight, from now on; nothing happens on another thread than the main one."""
    if threading.current_thread() is not threading.main_thread() or _Now.pid == os.getpid():
        return
    read, write = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(write, False)
    former = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    _Now.pid = os.getpid()
    threading.Thread(target=_watch, args=(read, former), name="multiring-requests-interrupts", daemon=True).start()


def _watch(read: int, former: int) -> None:
    while True:
        numbers = os.read(read, 64)
        if former >= 0:  # whoever had it before
            with suppress(OSError):
                os.write(former, numbers)
        if signal.SIGINT in numbers and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            time.sleep(_PATIENCE_S)
            cancel_all()
