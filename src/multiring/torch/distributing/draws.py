"""What all draws of rank 0 for the other ranks have in common: what is refused, and how a failure reaches all ranks."""

from collections.abc import Sequence
from typing import Any

from multiring._frontend.errors import MismatchInternalError
from multiring.errors import ArgumentError


def require_indices(batch: Sequence[Any]) -> None:
    """Raise ArgumentError if a batch of indices is empty."""
    if not batch:
        raise ArgumentError("the loader's batch sampler drew a batch without indices; want one at least")


def words_of_failure(failure: Exception | None) -> str:
    """Return what rank 0 tells the others of an exception; empty: there is none."""
    return "" if failure is None else f"{type(failure).__name__}: {failure}"


def raise_failure_of_rank_0(failure: Exception | None, told: str, what: str) -> None:
    """Raise what rank 0's draw has raised, on every rank.

    Args:
        failure: the exception; None on the other ranks.
        told: rank 0's words of it, on every rank.
        what: what was drawn.

    Raises:
        MismatchInternalError: on the other ranks, if there are words.
    """
    if failure is not None:
        raise failure
    if told:
        raise MismatchInternalError(f"distribute: rank 0 could not draw {what}, and raised this: {told}")
