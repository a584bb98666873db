"""This process's threads: which wait for other ranks, at which of the program's lines, and which could do more.

A call that a framework makes in native code is waited for by a thread of multiring's, and by a thread of the program's
that Python cannot see waiting. The kernel can: it sleeps on a futex, without a time-out. As long as nothing else of the
process computes, nothing but the call can wake it.
"""

import os
import platform
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from multiring.runtime.group.handles import ChainedHandle, Waiter

_LINES = 3  # of a stack: the innermost
_MOST_CHARACTERS = 2000
_OWN_CODE = str(Path(__file__).parents[2])
# What a program calls, or is called by: its own lines say more.
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_PACKAGES = tuple({sysconfig.get_path(name) for name in ("purelib", "platlib")})
_OWN_THREADS = {"multiring control", "multiring timeline", "multiring rails", "multiring-mpi"}
REQUESTS = "multiring-requests"  # begins the names of the threads that serve native code
# Threads of libraries that call nothing of the program's: the end of a file's name, and the innermost function there.
_SERVANTS = (
    ("multiprocessing/queues.py", "_feed"),
    ("multiprocessing/resource_sharer.py", "_serve"),
    ("multiprocessing/pool.py", "_handle_tasks"),
    ("multiprocessing/pool.py", "_handle_workers"),
    ("concurrent/futures/thread.py", "_worker"),  # idle: whoever could give it something to do counts
    ("_utils/pin_memory.py", "_pin_memory_loop"),
    ("tqdm/_monitor.py", "run"),
)
_FUTEX = {"x86_64": "202", "aarch64": "98"}  # the number of the system call
_GLANCE_S = 0.01
_LASTING_S = 60.0  # who waits no longer than this by its own will may go on, and do something else


class Blocked(NamedTuple):
    """A thread of the program that waits for other ranks."""

    waiter: Waiter  # the innermost that says for what
    frame: FrameType  # of a request of native code: that of the program's thread
    is_lasting: bool  # until they have come, or something fails
    title: str = ""  # of what is waited for, where the frame does not say

    @property
    def where(self) -> str:
        """Where the program is, and what it waits for."""
        return described(self.frame, self.title)


class ThreadStates(NamedTuple):
    """What the program's threads do."""

    blocked: list[Blocked]
    others: int  # that could call anything
    is_main_at_rest: bool  # the main thread waits: for other ranks, or for other threads

    @property
    def is_single(self) -> bool:
        """Whether there is one thread, and it waits."""
        return len(self.blocked) == 1 and not self.others


def thread_states() -> ThreadStates:
    """Return what the program's threads do now."""
    frames = sys._current_frames()  # noqa: SLF001 -- the only way
    threads = {each.ident: each for each in threading.enumerate()}
    main = threading.main_thread().ident
    blocked: dict[int, Blocked] = {}
    served: dict[int, Blocked] = {}  # for requests of native code
    others: set[int] = set()
    carriers: set[int | None] = set()  # threads of ours that a program's thread waits for: not threads of its own
    for ident, frame in frames.items():
        name = threads[ident].name if ident in threads else ""
        if name in _OWN_THREADS or _is_servant(frame):
            continue
        waiters = waiters_in(frame)
        chained = next((each for each in waiters if isinstance(each, ChainedHandle)), None)
        if chained is not None and chained.thread is not None:
            carriers.add(chained.thread.ident)
            waiters = waiters_in(frames.get(chained.thread.ident or 0))
        found = next((each for each in waiters if each.key is not None), None)
        if found is None and name.startswith(REQUESTS):
            continue  # waits for a request of native code, whose caller counts
        if found is None:
            others.add(ident)
        elif name.startswith(REQUESTS):
            served[ident] = Blocked(found, frame, _is_lasting(frame), waiters[-1].title)
        else:
            blocked[ident] = Blocked(found, frame, _is_lasting(frame))
    program = frames.get(main or 0)
    rests = main in blocked or (program is not None and program.f_code.co_filename == threading.__file__)
    if served and program is not None:
        asleep = {ident for ident in others if _sleeps(threads.get(ident), frames[ident])}
        rests |= main in asleep
        callers = [frames[ident] for ident in sorted(asleep, key=lambda ident: ident != main)] or [program]
        for ident, each in served.items():
            blocked[ident] = each._replace(frame=callers[0])
        others -= asleep
        if _computes_natively(threads.values()):
            others.add(0)
    ours = [each for ident, each in sorted(blocked.items(), key=lambda item: item[0] != main) if ident not in carriers]
    return ThreadStates(ours, len(others - carriers), rests)


def _sleeps(thread: threading.Thread | None, frame: FrameType) -> bool:
    """Return whether a thread sleeps until another one wakes it; False where the kernel does not say.

    A framework may wake up now and then, to look for signals, and sleep again.
    """
    if thread is None:
        return False
    try:
        call = Path(f"/proc/self/task/{_task_of(thread)}/syscall").read_text(encoding="ascii").split()
    except OSError:
        return False
    # The number of the call, and its arguments: the fourth is the time-out.
    is_framework = frame.f_code.co_filename.startswith(_PACKAGES)
    return len(call) > 4 and call[0] == _FUTEX.get(platform.machine()) and (is_framework or call[4] == "0x0")


def _computes_natively(known: Iterable[threading.Thread]) -> bool:
    """Return whether a thread that Python does not know keeps running, or waiting for a disk."""
    ours = {str(_task_of(each)) for each in known}
    busy = _busy_tasks() - ours
    if busy:  # one that only looked after something sleeps again
        time.sleep(_GLANCE_S)
        busy &= _busy_tasks()
    return bool(busy)


def _task_of(thread: threading.Thread) -> int | None:
    """Return the kernel's number of a thread; in a fork Python has the parent's for the main thread."""
    return os.getpid() if thread is threading.main_thread() else thread.native_id


def _busy_tasks() -> set[str]:
    found = set()
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError, IndexError):
            state = (task / "stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()[0]
            if state in {"R", "D"}:
                found.add(task.name)
    return found


def main_place() -> str:
    """Return where this process's main thread is now, and what it waits for."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)  # noqa: SLF001 -- the only way
    waits = next((each for each in thread_states().blocked if each.title and each.frame is frame), None)
    return described(frame) if waits is None else waits.where


def waiters_in(frame: FrameType | None) -> list[Waiter]:
    """Return what the thread of `frame`, its innermost, waits for, the innermost wait first."""
    found = []
    while frame is not None:
        waiter = frame.f_locals.get("self") if frame.f_code.co_name == "wait" else None
        if isinstance(waiter, Waiter):
            found.append(waiter)
        frame = frame.f_back
    return found


def described(frame: FrameType | None, title: str = "") -> str:
    """Return where the thread of `frame` is, by the innermost of the program's lines, and what it waits for.

    Args:
        frame: the innermost.
        title: of what it waits for in native code.
    """
    summary = [] if frame is None else traceback.extract_stack(frame)
    lines = [
        each
        for each in reversed(summary)
        # TensorFlow makes functions of text for the operations of a library.
        if not each.filename.startswith((_OWN_CODE, "<frozen")) and not each.name.startswith("multiring_")
    ]
    own = [each for each in lines if not each.filename.startswith(_LIBRARIES)]
    shown = [
        f"{Path(each.filename).name}:{each.lineno} in {each.name}{f' ({each.line})' if each.line else ''}"
        for each in (own or lines)[:_LINES]
    ]
    waiters = waiters_in(frame)
    found = waiters[-1].title if waiters else title  # the outermost: what it was started as
    waits = f", and waits for {found}" if found else ""
    return f"at {', called at '.join(shown)[:_MOST_CHARACTERS] or 'no line of Python'}{waits}"


def _is_servant(frame: FrameType) -> bool:
    """Return whether the thread is a library's own, at work for it or waiting for more."""
    inner: FrameType | None = frame
    while inner is not None:
        code = inner.f_code
        for file, function in _SERVANTS:
            if code.co_name == function and code.co_filename.endswith(file):
                # A worker that is not idle has the program's frames within this one.
                return inner is frame or function != "_worker"
        inner = inner.f_back
    return False


def _is_lasting(frame: FrameType | None) -> bool:
    """Return whether no wait of the thread ends by itself before long."""
    while frame is not None:
        if frame.f_code.co_name == "wait" and isinstance(frame.f_locals.get("self"), Waiter):
            limit_s = frame.f_locals.get("timeout")
            if limit_s is not None and limit_s < _LASTING_S:
                return False
        frame = frame.f_back
    return True
