"""What the ranks of an engine on devices tell each other while they open it."""

import json
import re
from typing import TYPE_CHECKING, Any

import numpy as np

from multiring.errors import ArgumentError, CollectiveError, UnsupportedError

if TYPE_CHECKING:
    from multiring._runtime.group.group import Group

ELSEWHERE = "NCCL failed on rank "
"""How a rank's error begins if its cause is another rank's."""
MOST_TEXT = 400
"""Characters of an error that other ranks get."""
_ROW = 1024  # bytes of a rank's line in `told_by_all`


def device_number(device: int | str) -> int:
    """Return the number of a CUDA device that is named "cuda:N" or N."""
    found = re.fullmatch(r"(?:cuda:)?(\d+)", str(device))
    if found is not None:
        return int(found[1])
    kind = str(device).partition(":")[0]
    if kind != "cuda" and kind.isalpha():
        raise UnsupportedError(f"device={str(device)!r} is not served; want a CUDA device, such as 'cuda:0'")
    raise ArgumentError(f"device={str(device)!r}: want 'cuda:N' or N, the number of a CUDA device")


def told_by_all(host: "Group", own: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what every rank tells, in the order of the ranks. Long texts are cut."""
    row = np.zeros((1, _ROW), np.uint8)
    text = json.dumps({key: each[:MOST_TEXT] if isinstance(each, str) else each for key, each in own.items()}).encode()
    row[0, : len(text)] = np.frombuffer(text, np.uint8)
    return [json.loads(bytes(each).rstrip(b"\0")) for each in host.all_gather(row)]


def require_no_problem(host: "Group", told: list[dict[str, Any]]) -> None:
    """Raise the first problem of any rank, with its rank."""
    problems = {rank: each["problem"] for rank, each in zip(host.ranks, told, strict=True) if each["problem"]}
    causes = {rank: text for rank, text in problems.items() if not text.startswith(ELSEWHERE)} or problems
    for rank, text in causes.items():
        raise CollectiveError(f"rank {rank}: {text}")
