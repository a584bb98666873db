"""Errors of CUDA that do not stay, at any of the calls that multiring makes, on torch's CUDA build on the stand-ins."""

import gc
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

from tests.standin.torch_devices import fail_call_here, last_error

import multiring

INVALID_VALUE, OUT_OF_MEMORY = 1, 2
# Functions of CUDA that multiring calls. The stand-ins' operators, and torch's allocator, take it for granted that CUDA
# works; test_bad_calls_are_told_on_all_ranks has a device without memory.
STREAMS = {"_cuda_getCurrentStream", "_cuda_isCurrentStreamCapturing", "_cuda_setStream", "record_stream"}
EVENTS = {"query", "record", "synchronize", "wait", "wait_event", "__new__"}
MEMORY = {"_foreach_copy_", "copy_", "cudaHostRegister"}
FUNCTIONS = STREAMS | EVENTS | MEMORY
MANY = 1 << 20

SOURCES = str(Path(multiring.__file__).parent)


class Failing:
    """Lets one of the functions in C that multiring calls fail, by an error of CUDA in it.

    Only functions that call CUDA count. What torch does while it frees memory ends the process if CUDA fails. It is not
    in such a function, unless Python collects garbage there; so none is collected meanwhile.

    Args:
        code: the error.
        everywhere: whether functions count on any thread; else on the thread that makes this object.
    """

    def __init__(self, code: int = INVALID_VALUE, *, everywhere: bool = True) -> None:
        self.code = code
        self._left = -1  # functions before the one that fails; -1: none fails
        self._depth = threading.local()
        self.kept: list[tuple[str, int]] = []  # calls of multiring that began with an error of an earlier call, and it
        if everywhere:
            threading.setprofile(self._see)  # of threads that start from now on
        sys.setprofile(self._see)

    def begin(self, after: int) -> None:
        """Let a function fail, after some that do not."""
        gc.disable()
        self._left = after

    def end(self) -> bool:
        """Let none fail any more; return whether one has failed."""
        has_failed, self._left = self._left < 0, -1
        gc.enable()
        return has_failed

    def _see(self, frame: FrameType | None, event: str, function: Any) -> None:
        depth = getattr(self._depth, "value", 0)
        if event == "c_call":
            is_call = depth == 0 and function.__name__ in FUNCTIONS and _is_ours(frame)
            if is_call and (code := last_error()):
                self.kept.append((function.__name__, code))
            if is_call and self._left >= 0:
                fail_call_here(self.code, 0 if self._left == 0 else MANY)
                depth = 1
            elif depth:
                depth += 1
        elif event in ("c_return", "c_exception") and depth:
            depth -= 1
            if depth == 0 and fail_call_here(0, -1) not in (0, MANY) and self._left >= 0:
                self._left -= 1
        self._depth.value = depth


def _is_ours(frame: FrameType | None) -> bool:
    """Return whether a function of multiring has called `frame`, perhaps by functions of torch."""
    while frame is not None and "/torch/" in frame.f_code.co_filename and SOURCES not in frame.f_code.co_filename:
        frame = frame.f_back
    return frame is not None and SOURCES in frame.f_code.co_filename
