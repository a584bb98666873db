"""Run functions in threads: the functions of `horovod.runner.util.threads`."""

import contextlib
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

_LOOK_S = 0.1  # a join with a time-out lets Ctrl-C through


def in_thread(
    target: Callable[..., object],
    args: tuple[Any, ...] = (),
    name: str | None = None,
    daemon: bool = True,
    silent: bool = False,
) -> threading.Thread:
    """Start `target(*args)` in a thread, and return the thread.

    Args:
        target: the function to run.
        args: a tuple of arguments.
        name: the thread's name.
        daemon: whether the process may end before the thread.
        silent: whether to drop an exception of `target` instead of printing it.

    Raises:
        ValueError: `args` is not a tuple.
    """
    if not isinstance(args, tuple):
        raise ValueError(f"args={args!r} is a {type(args).__name__}; want a tuple, (x,) for one argument")  # noqa: TRY004 -- Horovod's type
    wanted = _silenced(target) if silent else target
    thread = threading.Thread(target=wanted, args=args, name=name, daemon=daemon)
    thread.start()
    return thread


def execute_function_multithreaded(
    fn: Callable[..., Any],
    args_list: Sequence[Sequence[Any]],
    block_until_all_done: bool = True,
    max_concurrent_executions: int = 1000,
) -> dict[int, Any] | None:
    """Call `fn` in threads for each of `args_list`, and return results by index.

    At most `max_concurrent_executions` calls run at a time. Without `block_until_all_done` the function returns None at
    once, and the threads end with the process.

    Raises:
        RuntimeError: a call failed. The first call's error is the cause (`__cause__`).
    """
    waiting: queue.SimpleQueue[tuple[int, Sequence[Any]]] = queue.SimpleQueue()
    for job in enumerate(args_list):
        waiting.put(job)
    results: dict[int, Any] = {}
    failures: dict[int, Exception] = {}

    def work() -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                index, arguments = waiting.get_nowait()
                try:
                    results[index] = fn(*arguments)
                except Exception as error:  # noqa: BLE001 -- the calling thread raises it below
                    failures[index] = error

    count = min(max_concurrent_executions, len(args_list))
    threads = [in_thread(work, daemon=not block_until_all_done) for _ in range(count)]
    if not block_until_all_done:
        return None
    for thread in threads:
        while thread.is_alive():
            thread.join(_LOOK_S)
    if failures:
        first = min(failures)
        called = getattr(fn, "__name__", repr(fn))
        raise RuntimeError(f"{len(failures)} of {len(args_list)} calls of {called} failed") from failures[first]
    return results


def on_event(
    event: threading.Event,
    func: Callable[..., object],
    args: tuple[Any, ...] = (),
    stop: threading.Event | None = None,
    check_stop_interval_s: float = 1.0,
    daemon: bool = True,
    silent: bool = False,
) -> threading.Thread:
    """Start and return a thread that calls `func(*args)` when `event` is set.

    The thread ends without the call if `stop` is set first. It checks `stop` every `check_stop_interval_s` seconds.

    Raises:
        ValueError: `event` or `stop` is not a threading.Event.
    """
    if not isinstance(event, threading.Event):
        raise ValueError(f"event={event!r} is a {type(event).__name__}; want a threading.Event")  # noqa: TRY004 -- Horovod's type
    if stop is not None and not isinstance(stop, threading.Event):
        raise ValueError(f"stop={stop!r} is a {type(stop).__name__}; want a threading.Event")
    wanted = _silenced(func) if silent else func

    def wait() -> None:
        while not event.wait(None if stop is None else check_stop_interval_s):
            if stop is not None and stop.is_set():
                return
        if stop is None or not stop.is_set():
            wanted(*args)

    return in_thread(wait, daemon=daemon)


def _silenced(target: Callable[..., object]) -> Callable[..., None]:
    def quiet(*arguments: Any) -> None:
        with contextlib.suppress(Exception):
            target(*arguments)

    return quiet
