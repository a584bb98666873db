"""Complete the state of optimizers whose ranks have divided it, before it is read."""

from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class _GathersState(Protocol):
    def gather_state(self) -> None: ...


def gather_state(value: Any) -> None:
    """Give every rank the whole state of `value` if its ranks have divided it; every rank calls it."""
    if isinstance(value, _GathersState):
        value.gather_state()
