"""The interface of an engine.

An engine transfers and reduces a group's data in its own memory. A Group on an engine (`Group.on_engine`) checks the
arguments, makes the plan, and has the ranks agree on each operation over the host's network, like any other Group. Then
the engine executes the plan's schedule asynchronously.
"""

from typing import TYPE_CHECKING, Any, Protocol

from multiring._runtime.arrays import Buffer
from multiring._runtime.group.compile import Request
from multiring.errors import CollectiveError
from multiring.planner import Plan

if TYPE_CHECKING:
    from multiring._runtime.group.group import Group


class RevokedError(CollectiveError):
    """The ranks did not agree on an earlier operation, and this one had started on some rank."""


class RunningOperation(Protocol):
    """An operation that an engine has started.

    An engine may represent it by an event of its device.
    """

    def done(self) -> bool:
        """Return whether `wait` would return or raise at once."""

    def wait(self, timeout: float | None = None) -> Any:
        """Wait until the operation has ended on this rank.

        Raises:
            TimeoutError: the operation is still in progress after `timeout` seconds.
            MultiringError: the operation has failed.
        """

    def await_device(self) -> None:
        """Wait until the engine does not use the operation's memory any more, after the operation has failed."""

    def order(self, stream: int) -> None:
        """Make a stream of the caller wait for the operation. The host does not wait for the device.

        Raises:
            MultiringError: the operation has failed already. A stream that waits goes on when it fails later.
            UnsupportedError: the engine has no streams.
        """


class Engine(Protocol):
    """One rank's end of an engine.

    A group calls `start`, `confirm` and `refuse` from a single thread, in the same order on all ranks. If an operation
    fails on one rank, the engine must report that to its other ranks. Each of them must raise within bounded time.
    """

    @property
    def name(self) -> str:
        """The engine's name, as in `Plan.engine`; the same on all ranks."""

    def serve(self, group: int) -> None:
        """Learn the id of the group whose operations follow. Timelines call the operations by it."""

    def on(self, host: "Group") -> "Engine":
        """Return this rank's end for another group: a subgroup, or other operations of the same ranks.

        The call is local. `host` is a group of the other group's ranks in host memory, for this end alone.
        """

    def allocate(self, shape: tuple[int, ...], dtype: str) -> Any:
        """Return a new, uninitialized array in the engine's memory.

        `dtype` is NumPy's name of the type.
        """

    def buffer_of(self, array: Any, *, writes: bool) -> Buffer:
        """Return the memory of `array`. Its address has a meaning for the engine only.

        Raises:
            ArgumentError: the array is not an array of this engine; or it is immutable and `writes` is set.
        """

    def start(
        self, number: int, plan: Plan, request: Request, buffers: tuple[Buffer | None, Buffer]
    ) -> RunningOperation:
        """Start an operation on which all ranks have agreed.

        Args:
            number: the place of the operation in the group's order. Numbers increase, and are the same on all ranks.
            plan: the plan, whose schedule determines the result and the order of summation.
            request: the collective, the type, each rank's elements and the reduction.
            buffers: the input and the output. An all_reduce and a broadcast use the second buffer only. No other code
                uses the buffers until the operation has ended.

        Raises:
            MultiringError: the operation cannot be started.
        """

    def start_ahead(
        self, number: int, plan: Plan, request: Request, buffers: tuple[Buffer | None, Buffer]
    ) -> RunningOperation | None:
        """Start an operation before the ranks have agreed on it; or return None, and `start` follows.

        Called by the caller's thread, in the order of the calls, if `start` or this method has returned for all earlier
        operations. The decision may differ between the ranks. `confirm` follows, in the group's thread.
        """

    def confirm(self, operation: RunningOperation, error: Exception | None) -> None:
        """Take note that the ranks have agreed on an operation of `start_ahead`, or that `error` has prevented it."""

    def refusal(self, number: int) -> RevokedError | None:
        """Return the error of operation `number` if the ranks refused an earlier one with it; else None."""

    def refuse(self, number: int, error: Exception) -> bool:
        """End the operations from `number` on that `start_ahead` has started, as the ranks did not agree on `number`.

        All ranks call this method together, in the place of `start`. Operations that one rank has
        started ahead fail on all ranks. The engine stays usable.

        Returns:
            Whether a rank has started operation `number`, so that the contents of its arrays are undefined.
        """
