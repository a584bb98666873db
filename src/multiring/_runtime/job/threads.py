"""This process's threads, and which of them wait for other ranks.

The module returns the program's lines of a waiting thread, and counts the threads that could make further calls. If a
framework makes a call in native code, a thread of multiring waits for the call, and a thread of the program waits for
that thread. Python does not show that the second thread waits. The kernel does: the thread sleeps on a futex without a
time-out. As long as no other thread of the process computes, only the end of the call can wake it.

Calls with tensors on a device are made by threads of multiring that first wait for a copy. The program's thread then
waits for such a thread. The program's thread may be one that only torch's native code knows, as in a backward pass.
"""

import concurrent.futures
import os
import platform
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from multiring._runtime.group.handles import ChainedHandle, Waiter

_LINES = 3  # the number of innermost lines of a stack that are shown
_MOST_CHARACTERS = 2000
_RUNS = 8  # the number of runs of ranks that are shown
_OWN_CODE = str(Path(__file__).parents[2])
# Lines of libraries are shown only if the stack has no lines of the program.
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_PACKAGES = tuple({sysconfig.get_path(name) for name in ("purelib", "platlib")})
# Threads that make no call of the program. Some carry on operations that the program has started and for which it waits
# by handles of its own.
_OWN_THREADS = {
    "multiring control",
    "multiring votes",
    "multiring steps",
    "multiring intake",
    "multiring timeline",
    "multiring rails",
    "multiring-mpi",
    "multiring nccl",
    "multiring nccl abort",
    "multiring staged",
    "multiring follow-ups",
    "multiring operations ahead",
    "multiring device path",
    "multiring to other hosts",
    "multiring from other hosts",
    "multiring meeting",
    "multiring munge",
    "multiring study",
    "multiring study storage",
    "multiring study votes",
    "multiring study end",
}
_ENGINES = "multiring engine "  # the beginning of the names of threads that start operations of engines, in order
REQUESTS = "multiring-requests"  # the prefix of the names of threads that serve native code
# The beginnings of the names of multiring.data's threads. Such a thread counts as the program's only while it runs the
# program's code, for instance a transform. While it is idle, or waits for a source of data, it makes no call.
READERS = ("multiring-data", "multiring-stage", "multiring-blocks", "multiring-source")
# Threads that carry on the program's calls with device tensors, and the function in which each waits for the next call.
_CARRIERS = {
    "multiring submissions": "_run",
    "multiring bucket start": "_start_all",
    "multiring bucket end": "_end_all",
    "multiring issuing": "_issue",
    "multiring returning": "_return",
    "multiring message": "",  # it ends with its message
}
# Threads that run the program's callbacks, and the function in which each waits for the next one.
_CALLERS = {"multiring futures": "_run"}
_WAITING = {"wait", "order", "is_refused"}  # the methods of a handle that wait for other ranks
_WAITS = (threading.__file__, concurrent.futures._base.__file__)  # noqa: SLF001 -- where a wait for a thread is
# Library threads that never call the program: the end of a file's name, and a function in it.
_SERVANTS = (
    ("multiprocessing/queues.py", "_feed"),
    ("multiprocessing/resource_sharer.py", "_serve"),
    ("multiprocessing/pool.py", "_handle_tasks"),
    ("multiprocessing/pool.py", "_handle_workers"),
    ("concurrent/futures/thread.py", "_worker"),  # if idle: a thread that could submit work counts instead
    ("_utils/pin_memory.py", "_pin_memory_loop"),
    ("tqdm/_monitor.py", "run"),
)
_FUTEX = {"x86_64": "202", "aarch64": "98"}  # the number of the system call
_GLANCE_S = 0.01
_LASTING_S = 60.0  # a thread with a shorter time-out may continue soon and make another call


class Blocked(NamedTuple):
    """A thread of the program that waits for other ranks."""

    waiter: Waiter  # the innermost handle on the stack that has a key
    frame: FrameType  # the waiting thread's frame; for a request of native code, the frame of the program's thread
    is_lasting: bool  # whether the wait has no time-out, or a long one
    title: str = ""  # the operation's title, if the frame does not show it

    @property
    def where(self) -> str:
        """A description of the program's line and the operation that it waits for."""
        return described(self.frame, self.title)

    @property
    def among(self) -> str:
        """The ranks that take part in the operation; "" if it is a message between two."""
        return among_text(self.waiter.members)


class ThreadStates(NamedTuple):
    """The states of the program's threads."""

    blocked: list[Blocked]
    others: int  # the number of threads that could make a call
    is_main_at_rest: bool  # whether the main thread waits for other ranks or for other threads

    @property
    def is_single(self) -> bool:
        """Whether the program has a single thread, and this thread waits."""
        return len(self.blocked) == 1 and not self.others


class _ThreadRoles:
    """What the frames of all threads show, by the threads' idents."""

    def __init__(self, frames: dict[int, FrameType], threads: dict[int | None, threading.Thread]) -> None:
        self.blocked: dict[int, Blocked] = {}
        self.served: dict[int, Blocked] = {}  # threads that serve native code, for which the program's threads wait
        self.carried: dict[int, Blocked] = {}  # multiring's threads that carry on calls with device tensors
        self.others: set[int] = set()
        self.carriers: set[int | None] = set()  # multiring's threads for which a thread of the program waits
        for ident, frame in frames.items():
            name = threads[ident].name if ident in threads else ""
            if (
                name in _OWN_THREADS
                or name.startswith(_ENGINES)
                or _is_servant(frame)
                or frame.f_code.co_name in (_CARRIERS.get(name), _CALLERS.get(name))
            ):
                continue
            self._sort(ident, name, frame, frames)

    def _sort(self, ident: int, name: str, frame: FrameType, frames: dict[int, FrameType]) -> None:
        waiters = waiters_in(frame)
        chained = next((each for each in waiters if isinstance(each, ChainedHandle)), None)
        if chained is not None and chained.thread is not None:
            self.carriers.add(chained.thread.ident)
            waiters = waiters_in(frames.get(chained.thread.ident or 0))
        found = next((each for each in waiters if each.key is not None), None)
        if found is None and name.startswith(REQUESTS):
            return  # the thread is idle; count the native caller of a request instead
        if found is None and name.startswith(READERS) and not _runs_program(frame):
            return
        if found is None:
            self.others.add(ident)
        elif not name or name.startswith((REQUESTS, "Dummy-")):  # the thread of native code, or one that serves it
            self.served[ident] = Blocked(found, frame, _is_lasting(frame), waiters[-1].title)
        elif name in _CARRIERS:
            self.carried[ident] = Blocked(found, frame, _is_lasting(frame), waiters[-1].title)
        else:
            self.blocked[ident] = Blocked(found, frame, _is_lasting(frame))


def thread_states() -> ThreadStates:
    """Return the current states of the program's threads."""
    frames = sys._current_frames()  # noqa: SLF001 -- there is no public function
    threads = {each.ident: each for each in threading.enumerate()}
    main = threading.main_thread().ident
    seen = _ThreadRoles(frames, threads)
    blocked, others = seen.blocked, seen.others
    program = frames.get(main or 0)
    rests = main in blocked or (program is not None and program.f_code.co_filename == threading.__file__)
    awaiting = {ident for ident in others if seen.carried and _awaits_own_thread(frames[ident])}
    # Without a thread that waits for it, the program goes on beside an operation that is carried on.
    served = seen.served | (seen.carried if awaiting else {})
    if served and program is not None:
        asleep = awaiting | {ident for ident in others if _sleeps(threads.get(ident), frames[ident])}
        rests |= main in asleep
        callers = [frames[ident] for ident in sorted(asleep, key=lambda ident: ident != main)] or [program]
        for ident, each in served.items():
            blocked[ident] = each._replace(frame=callers[0])
        others -= asleep
        if _computes_natively(threads.values()):
            others.add(0)
    by_main = sorted(blocked.items(), key=lambda item: item[0] != main)
    ours = [each for ident, each in by_main if ident not in seen.carriers]
    return ThreadStates(ours, len(others - seen.carriers), rests)


def _sleeps(thread: threading.Thread | None, frame: FrameType) -> bool:
    """Return whether a thread sleeps until another thread wakes it.

    Return False if the kernel gives no answer. The sleep of a framework's thread may have a time-out, because it wakes
    up from time to time to check for signals.
    """
    if thread is None:
        return False
    try:
        call = Path(f"/proc/self/task/{_task_of(thread)}/syscall").read_text(encoding="ascii").split()
    except OSError:
        return False
    # The file has the number of the system call and its arguments; the fourth argument is the time-out.
    is_framework = frame.f_code.co_filename.startswith(_PACKAGES)
    return len(call) > 4 and call[0] == _FUTEX.get(platform.machine()) and (is_framework or call[4] == "0x0")


def _awaits_own_thread(frame: FrameType) -> bool:
    """Return whether a thread waits, without a time-out, in code of multiring for another thread."""
    inner: FrameType | None = frame
    while inner is not None and inner.f_code.co_filename in _WAITS:
        if inner.f_locals.get("timeout") is not None:
            return False
        inner = inner.f_back
    return inner is not None and inner is not frame and inner.f_code.co_filename.startswith(_OWN_CODE)


def _computes_natively(known: Iterable[threading.Thread]) -> bool:
    """Return whether a native thread keeps running or waiting for a disk.

    A native thread is unknown to Python.
    """
    ours = {str(_task_of(each)) for each in known}
    busy = _busy_tasks() - ours
    if busy:  # a thread that was awake for a moment only sleeps again
        time.sleep(_GLANCE_S)
        busy &= _busy_tasks()
    return bool(busy)


def _task_of(thread: threading.Thread) -> int | None:
    """Return the kernel's id of a thread.

    In a fork, Python still has the parent's id for the main thread.
    """
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
    """Return a description of the main thread's line and of its wait, if any."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)  # noqa: SLF001 -- there is no public function
    waits = next((each for each in thread_states().blocked if each.title and each.frame is frame), None)
    return described(frame) if waits is None else waits.where


def waiters_in(frame: FrameType | None) -> list[Waiter]:
    """Return the handles that the stack of `frame` waits for, the innermost first."""
    found = []
    while frame is not None:
        waiter = frame.f_locals.get("self") if frame.f_code.co_name in _WAITING else None
        if isinstance(waiter, Waiter):
            found.append(waiter)
        frame = frame.f_back
    return found


def described(frame: FrameType | None, title: str = "") -> str:
    """Return a description of a thread: the program's lines, and its wait, if any.

    Args:
        frame: the thread's innermost frame.
        title: the operation that the thread waits for in native code, if any.
    """
    summary = [] if frame is None else traceback.extract_stack(frame)
    lines = [
        each
        for each in reversed(summary)
        # TensorFlow generates functions for a library's operations; they have no source lines.
        if not each.filename.startswith((_OWN_CODE, "<frozen")) and not each.name.startswith("multiring_")
    ]
    own = [each for each in lines if not each.filename.startswith(_LIBRARIES)]
    shown = [
        f"{Path(each.filename).name}:{each.lineno} in {each.name}{f' ({each.line})' if each.line else ''}"
        for each in (own or lines)[:_LINES]
    ]
    waiters = waiters_in(frame)
    found = waiters[-1].title if waiters else title  # the outermost handle is the one that the program started
    among = among_text(waiters[-1].members) if waiters else ""
    waits = f", and waits for {found}{among and f', among {among}'}" if found else ""
    return f"at {', called at '.join(shown)[:_MOST_CHARACTERS] or 'no line of Python'}{waits}"


def among_text(ranks: Sequence[int]) -> str:
    """Return ranks as a short text, such as "ranks 0 to 7, 9"; "" for none."""
    runs: list[tuple[int, int]] = []
    for rank in sorted(ranks):
        is_next = bool(runs) and rank == runs[-1][1] + 1
        runs[-1:] = [(runs[-1][0], rank)] if is_next else [*runs[-1:], (rank, rank)]
    told = [
        str(last) if first == last else f"{first}{', ' if last == first + 1 else ' to '}{last}" for first, last in runs
    ]
    more = f" and {sum(last - first + 1 for first, last in runs[_RUNS:])} more" if len(runs) > _RUNS else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(told[:_RUNS])}{more}" if told else ""


def _is_servant(frame: FrameType) -> bool:
    """Return whether a library's own thread runs none of the program's code."""
    inner: FrameType | None = frame
    while inner is not None:
        code = inner.f_code
        for file, function in _SERVANTS:
            if code.co_name == function and code.co_filename.endswith(file):
                # A worker that is not idle has frames of the program inside this one.
                return inner is frame or function != "_worker"
        inner = inner.f_back
    return False


def _runs_program(frame: FrameType) -> bool:
    """Return whether a line of the program is on a thread's stack; libraries' lines are none."""
    inner: FrameType | None = frame
    while inner is not None:
        if not inner.f_code.co_filename.startswith((_OWN_CODE, *_LIBRARIES, "<frozen")):
            return True
        inner = inner.f_back
    return False


def _is_lasting(frame: FrameType | None) -> bool:
    """Return whether no wait on the thread's stack has a short time-out."""
    while frame is not None:
        if frame.f_code.co_name == "wait" and isinstance(frame.f_locals.get("self"), Waiter):
            limit_s = frame.f_locals.get("timeout")
            if limit_s is not None and limit_s < _LASTING_S:
                return False
        frame = frame.f_back
    return True
