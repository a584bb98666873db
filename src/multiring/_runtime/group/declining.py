"""Operations whose preparation fails on one rank: the other ranks get its error, in place of waiting for it."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from multiring.errors import MultiringError, StallError, StateError

if TYPE_CHECKING:
    from multiring._runtime.group.group import Group

UNTOLD = StateError, StallError
"""Errors after which no other rank can be reached."""


@contextmanager
def declining(group: "Group", operations: int = 1, label: str = "") -> Iterator[None]:
    """Decline the group's next operations if the block, which prepares them and posts none, raises an error.

    Args:
        group: the group of the operations.
        operations: how many operations follow the block.
        label: their label.
    """
    try:
        yield
    except UNTOLD:
        raise
    except Exception as error:
        with suppress(MultiringError):
            for _ in range(operations):
                group.calls.decline(label, error)
        raise
