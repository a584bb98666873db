"""Forks of a process while another of its threads holds every lock of multiring."""

import functools
import gc
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

CHILD_S = 20  # seconds that each call in a fork may take
_LOCKS = (type(threading.Lock()), type(threading.RLock()), threading.Condition)


def locks_of_multiring() -> list[Any]:
    """Return the locks and semaphores that objects, classes and modules of multiring hold."""
    modules = [vars(module) for name, module in list(sys.modules.items()) if name.startswith("multiring")]
    kinds = [each for module in modules for each in module.values() if isinstance(each, type)]
    owners = [*modules, *(dict(vars(kind)) for kind in kinds if str(kind.__module__).startswith("multiring"))]
    for each in gc.get_objects():
        if str(type(each).__module__).startswith("multiring."):
            names = [name for kind in type(each).__mro__ for name in vars(kind).get("__slots__", ())]
            owners.append({**getattr(each, "__dict__", {}), **{name: getattr(each, name, None) for name in names}})
    values = [value for owner in owners for value in list(owner.values())]
    # Before Python 3.12, this property has a lock for all objects of its class.
    values += [getattr(value, "lock", None) for value in values if isinstance(value, functools.cached_property)]
    return list({id(value): value for value in values if isinstance(value, (*_LOCKS, threading.Semaphore))}.values())


@contextmanager
def all_locks_taken_elsewhere() -> Iterator[None]:
    """Have another thread hold every lock of multiring inside the block."""
    held, free = threading.Event(), threading.Event()

    locks = locks_of_multiring()

    def hold() -> None:
        taken = []
        for each in locks:
            if isinstance(each, threading.Semaphore):
                while each.acquire(blocking=False):
                    taken.append(each)
            elif each.acquire(timeout=1):
                taken.append(each)
        held.set()
        free.wait()
        for each in taken:
            each.release()

    gc.disable()  # a finalizer in this thread could need one of the locks
    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    try:
        yield
    finally:
        free.set()
        thread.join()
        gc.enable()


def forked() -> tuple[int, int, int]:
    """Fork this process; return the child's number (0 in the child) and the ends of a pipe.

    SIGALRM ends the child; pytest's time-out has another action for it.
    """
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of forks beside threads
        child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
    return child, reading, writing


def outcomes_in_a_fork(calls: Mapping[str, Callable[[], object]]) -> dict[str, str]:
    """Call functions in a fork that is made while another thread holds every lock of multiring.

    The parent's threads go on after the fork.

    Returns:
        By name, "" for each call that returned, or the exception that it raised. Calls after one that did not end in
        `CHILD_S` seconds are missing, and so is this one.
    """
    with all_locks_taken_elsewhere():
        child, reading, writing = forked()
        if child == 0:
            _call_all(calls, writing)
    os.close(writing)
    with os.fdopen(reading, encoding="utf-8") as pipe:
        told = pipe.read().split("\0")[:-1]
    os.waitpid(child, 0)
    return {each.partition("\n")[0]: each.partition("\n")[2] for each in told}


def _call_all(calls: Mapping[str, Callable[[], object]], writing: int) -> None:
    for name, call in calls.items():
        signal.alarm(CHILD_S)
        try:
            call()
        except BaseException:  # noqa: BLE001 -- the parent shows it
            ended = traceback.format_exc()
        else:
            ended = ""
        os.write(writing, f"{name}\n{ended}\0".encode())
    os._exit(0)
