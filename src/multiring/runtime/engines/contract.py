"""What an engine is, other than the native core: it carries a group's bytes and combines them, on memory of its own.

A Group that is made on one (`Group.on_engine`) checks arguments, plans, and has the ranks agree on each operation over
the host's network, as for its own; the engine then does what the plan's schedule says, asynchronously.
"""

from typing import Any, Protocol

from multiring.planner import Plan
from multiring.runtime.arrays import Buffer
from multiring.runtime.group.compile import Request


class Running(Protocol):
    """An operation that an engine has started; where its device has events, it is one."""

    def done(self) -> bool:
        """Whether `wait` would return, or raise, at once."""

    def wait(self, timeout: float | None = None) -> Any:
        """Return once the operation has ended on this rank.

        Raises:
            TimeoutError: it is still going on after `timeout` seconds.
            MultiringError: it has failed.
        """


class Engine(Protocol):
    """One rank's end of an engine. A group calls `start` on one thread, in an order that is the same on all ranks.

    A failure on one rank is the engine's to tell its other ends of: each raises, in bounded time.
    """

    @property
    def name(self) -> str:
        """What `Plan.engine` says; the same on all ranks."""

    def allocate(self, shape: tuple[int, ...], dtype: str) -> Any:
        """Return an array of undefined contents in the engine's memory; `dtype` is NumPy's name."""

    def buffer_of(self, array: Any, *, writes: bool) -> Buffer:
        """Return where `array` is; the address is the engine's own, which nobody else reads or writes.

        Raises:
            ArgumentError: it is none of the engine's; or `writes`, and it never changes.
        """

    def start(self, plan: Plan, request: Request, buffers: tuple[Buffer | None, Buffer]) -> Running:
        """Start an operation that all ranks have agreed on.

        Args:
            plan: its schedule says what the result is, and in which order sums are taken.
            request: the collective, the type, each rank's elements and the reduction.
            buffers: what this rank brings, and where the result goes; an all_reduce and a broadcast work in the second
                alone. They are the engine's until the operation has ended.

        Raises:
            MultiringError: it cannot be started.
        """
