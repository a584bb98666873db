"""The threads that serve requests of native code. They submit the requests in order, and wait for the results.

Each request in flight occupies one thread, like an operation of Python. Stall warnings and the detection of deadlocks
between ranks therefore cover requests. The number of threads is the largest number of requests ever in flight, plus
one.
"""

import atexit
import ctypes
import logging
import os
import threading
from contextlib import suppress
from typing import Any

from multiring._forks import ForkSafeLock
from multiring._frontend.process_sets import Members, members_numbered
from multiring._frontend.requests.execution import Execution
from multiring._frontend.requests.failures import CANCELLED, OK, noted
from multiring._native import Request, RequestQueue
from multiring._runtime.job.threads import REQUESTS
from multiring.errors import StallError

_log = logging.getLogger("multiring")


class _Service:
    """Serves one queue until the process ends."""

    def __init__(self) -> None:
        self.queue = RequestQueue()
        # Native code stores the queue's address, so the queue must never be freed.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.queue))
        self.pid = os.getpid()
        self._lock = threading.Lock()
        self._threads = 0
        self._waiting: dict[int, Members] = {}  # by the number of each submitted request
        # The threads end with the interpreter. Later requests would wait forever, so the queue is closed first.
        atexit.register(self.queue.close)
        self.add_thread()

    def add_thread(self) -> None:
        with self._lock:
            self._threads += 1
            name = f"{REQUESTS}-{self._threads}"
        threading.Thread(target=self._serve, name=name, daemon=True).start()

    def _serve(self) -> None:
        while True:
            request = self.queue.take()
            if request.number in self._waiting:  # the second message about a request cancels it
                self._abort(request)
                self._pass_turn()
                continue
            try:
                if request.is_cancelled:
                    self._pass_turn()
                    self.queue.end(request, CANCELLED, "the request was cancelled before it started")
                    continue
                try:
                    members = members_numbered(request.process_set)
                    self._waiting[request.number] = members
                    finish = members.kept(Execution).submit(members, request)
                finally:
                    self._pass_turn()
                finish(request)
            except BaseException as error:  # noqa: BLE001 -- the caller must get every error
                self._waiting.pop(request.number, None)
                kind, text = noted(error)
                self.queue.end(request, CANCELLED if request.is_cancelled else kind, text)
            else:
                self._waiting.pop(request.number, None)
                self.queue.end(request, OK, "")
            del request

    def _pass_turn(self) -> None:
        if not self.queue.pass_turn():
            self.add_thread()

    def _abort(self, request: Request) -> None:
        members = self._waiting.get(request.number)
        if members is not None:
            with suppress(Exception):
                members.named.abort(StallError("cancelled on a rank that was waiting for it, for example by Ctrl-C"))


class _Now:
    """The service of this process; the first request for it creates it."""

    def __init__(self) -> None:
        self.lock = ForkSafeLock()
        self.service: _Service | None = None


_now = _Now()


def _service() -> _Service:
    with _now.lock:
        if _now.service is None or _now.service.pid != os.getpid():
            _now.service = _Service()
        return _now.service


def entry() -> Any:
    """Return the capsule for native code.

    It contains a MultiringEntry and is named MULTIRING_ENTRY_NAME.
    """
    return _service().queue.capsule


def entry_address() -> int:
    """Return the address of the MultiringEntry, for native code that does not accept a capsule."""
    return _service().queue.address


def cancel_all() -> int:
    """Make all requests in flight fail on all their ranks, and return the number of these requests."""
    return 0 if _now.service is None else _now.service.queue.cancel_all()
