"""Checks that all ranks are about to do the same, and reports the first difference."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import numpy as np

from multiring._runtime import Group
from multiring._runtime.group.handles import told_apart
from multiring.errors import MismatchError, MultiringError


@contextmanager
def reporting_errors(group: Group, what: str) -> Iterator[None]:
    """Report an error of the block to the other ranks.

    Their call of `require_alike` raises MismatchError.
    """
    try:
        yield
    except MultiringError as error:
        with suppress(MismatchError):  # this rank raises its own, more precise error
            require_alike(group, what, [f"failed with {type(error).__name__}: {error}"])
        raise


def require_alike(group: Group, what: str, lines: Sequence[str]) -> None:
    """Raise unless all ranks of `group` pass the same `lines`.

    Every rank of the group calls it.

    Args:
        group: the ranks that compare.
        what: the operation that needs the check, for the error message.
        lines: descriptions of the rank's arguments. Their order counts.

    Raises:
        MismatchError: on every rank: the lines differ. The message has each rank's version of the first difference.
    """
    text = json.dumps(list(lines)).encode()  # JSON, because a line may contain any character
    digest = np.frombuffer(hashlib.blake2b(text, digest_size=16).digest(), np.uint8)
    digests = np.asarray(group.all_gather(digest)).reshape(group.size, -1)
    if (digests == digests[0]).all():
        return
    sizes = np.asarray(group.all_gather(np.array([len(text)], np.int64)))
    texts = np.split(np.asarray(group.all_gather(np.frombuffer(text, np.uint8))), np.cumsum(sizes)[:-1])
    refuse_difference(what, [json.loads(each.tobytes()) for each in texts])


def refuse_difference(what: str, by_rank: Sequence[Sequence[str]]) -> None:
    """Raise unless all ranks have the same lines.

    Args:
        what: the operation that needs the check, for the error message.
        by_rank: each rank's descriptions of its arguments; all ranks pass the same value.

    Raises:
        MismatchError: the lines differ. The message has each rank's version of the first difference.
    """
    if all(list(each) == list(by_rank[0]) for each in by_rank):
        return
    number = next(i for i in range(max(map(len, by_rank))) if len({tuple(each[i : i + 1]) for each in by_rank}) > 1)
    here = {rank: each[number] if number < len(each) else "nothing more" for rank, each in enumerate(by_rank)}
    raise MismatchError(
        f"{what}: the ranks differ in item {number + 1} of {max(map(len, by_rank))}: {told_apart(here)}"
    )
