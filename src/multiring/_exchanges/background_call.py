"""A call of a foreign library that may never return: it runs in a thread, and the caller waits as long as it wants."""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from multiring._limits.processes import start_thread

_Result = TypeVar("_Result")


class BackgroundCall(Generic[_Result]):
    """One call of `function`, begun at once. A call that never returns does not keep the process from ending.

    Raises:
        LaunchError: the kernel refuses the thread.
    """

    def __init__(self, function: Callable[[], _Result]) -> None:
        self._function = function
        self._results: list[_Result] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True, name="multiring meeting")
        start_thread(self._thread, "this rank cannot start a thread, by which it meets the others")

    def is_over(self, wait_s: float) -> bool:
        """Return whether the call ends within `wait_s` seconds. Ctrl-C interrupts the wait."""
        self._thread.join(max(wait_s, 0.0))
        return not self._thread.is_alive()

    def result(self) -> _Result:
        """Return what the call returned, or raise what it raised. The call must be over."""
        if self._error is not None:
            raise self._error
        return self._results[0]

    def _run(self) -> None:
        try:
            self._results.append(self._function())
        except BaseException as error:  # noqa: BLE001 -- `result` raises it
            self._error = error
