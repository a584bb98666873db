"""Experiments with calls during a capture."""

import ctypes
from collections.abc import Callable
from typing import Any

from multiring._verify.behaviours.calls import (
    PAGE,
    copy,
    cuda,
    device_memory,
    device_memory_only,
    event,
    pinned,
    runtime,
    shared,
    stream,
)


def capturing(call: Callable[[Any, Any], Any], mode: int = 0) -> list[Any]:
    """Make a call during a capture; return its result, the capture's codes, and whether a graph was made."""
    c, one, side, graph = runtime(), stream(), stream(), ctypes.c_void_p()
    began = c.cudaStreamBeginCapture(one, mode)
    answer = call(one, side)
    ended = c.cudaStreamEndCapture(one, ctypes.byref(graph))
    c.cudaGetLastError()
    return [began, answer, ended, graph.value is not None]


@cuda
def calls_during_a_capture() -> dict[str, Any]:
    """Return the codes of calls during a capture in the strictest mode, on the captured and on other streams."""
    c, host, device = runtime(), pinned(64), device_memory(64)
    _, address, _ = shared(PAGE)
    before = event()
    c.cudaEventRecord(before, stream())

    def status(one: Any, _: Any) -> list[int]:
        found = ctypes.c_int(-1)
        return [c.cudaStreamIsCapturing(one, ctypes.byref(found)), found.value]

    def forked(*, join: bool) -> Callable[[Any, Any], Any]:
        def call(one: Any, side: Any) -> list[int]:
            mark, back = event(), event()
            codes = [c.cudaEventRecord(mark, one), c.cudaStreamWaitEvent(side, mark, 0), copy(host, device, 8, 2, side)]
            codes.append(c.cudaEventQuery(mark))
            if join:
                codes += [c.cudaEventRecord(back, side), c.cudaStreamWaitEvent(one, back, 0)]
            return codes

        return call

    def host_function(one: Any, _: Any) -> int:
        kept.append(ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: None))
        return int(c.cudaLaunchHostFunc(one, kept[-1], None))

    kept: list[Any] = []
    calls: dict[str, Callable[[Any, Any], Any]] = {
        "status": status,
        "stream synchronise": lambda one, _: c.cudaStreamSynchronize(one),
        "stream query": lambda one, _: c.cudaStreamQuery(one),
        "other stream synchronise": lambda _, side: c.cudaStreamSynchronize(side),
        "device synchronise": lambda *_: c.cudaDeviceSynchronize(),
        "event query": lambda *_: c.cudaEventQuery(before),
        "event synchronise": lambda *_: c.cudaEventSynchronize(before),
        "wait for an event outside": lambda one, _: c.cudaStreamWaitEvent(one, before, 0),
        "malloc": lambda *_: device_memory_only(64),
        "register": lambda *_: c.cudaHostRegister(ctypes.c_void_p(address), ctypes.c_size_t(PAGE), 0),
        "pinned copy": lambda one, _: copy(host, device, 8, 2, one),
        "pageable copy": lambda one, _: copy(ctypes.create_string_buffer(8), device, 8, 2, one),
        "host function": host_function,
        "fork and join": forked(join=True),
        "fork without join": forked(join=False),
    }
    return {name: capturing(call) for name, call in calls.items()}


@cuda
def calls_beside_a_capture_of_another_mode() -> dict[str, Any]:
    """Return the codes of an allocation during a capture, for the modes global, thread-local and relaxed."""
    return {str(mode): capturing(lambda *_: device_memory_only(64), mode) for mode in (0, 1, 2)}
