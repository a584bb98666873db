"""The cases of the bench: collectives, sizes and types, and the conversion of a time to bytes per second."""

import re
from dataclasses import dataclass

from multiring._bench.workers.contract import COLLECTIVES, DTYPES, OPS, itemsize
from multiring.errors import ArgumentError

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(b|kib|mib|gib)?", re.IGNORECASE)
_UNITS = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_DIVIDED = ("reduce_scatter", "all_gather", "all_to_all")
_ROOTED = ("broadcast",)
_REDUCING = ("all_reduce", "reduce_scatter")
# A pool of smaller buffers would have so many buffers that the look-ups would dominate the time.
LEAST_POOLED_BYTES = 2**16


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """One size of one collective; every library is timed on it.

    `device`: "cpu", or "cuda" for tensors in device memory.

    Raises:
        ArgumentError: the collective, type or operation is unknown, or the ranks cannot divide the size.
    """

    collective: str
    ranks: int
    size_bytes: int
    dtype: str = "float32"
    op: str = "sum"
    hosts: int = 1
    device: str = "cpu"

    def __post_init__(self) -> None:
        for value, known, what in (
            (self.collective, COLLECTIVES, "collective"),
            (self.dtype, DTYPES, "type"),
            (self.op, OPS, "operation"),
        ):
            if value not in known:
                raise ArgumentError(f"unknown {what} {value!r}, want one of {', '.join(known)}")
        if self.ranks < 1:
            raise ArgumentError(f"a job of {self.ranks} ranks: want at least 1")
        step = itemsize(self.dtype) * (self.ranks if self.collective in _DIVIDED else 1)
        if self.collective != "barrier" and (self.size_bytes < step or self.size_bytes % step):
            raise ArgumentError(
                f"{self.size_bytes} bytes of {self.dtype} cannot be the buffer of {self.collective} on {self.ranks} "
                f"ranks; want a multiple of {step}, like {max(self.size_bytes // step, 1) * step}"
            )
        if self.op != "sum" and self.collective not in _REDUCING:
            raise ArgumentError(f"{self.collective} does not reduce, so it takes no operation {self.op!r}")

    @property
    def count(self) -> int:
        """The number of elements of the longer side."""
        return self.size_bytes // itemsize(self.dtype)

    @property
    def bus_factor(self) -> float:
        """The factor from algbw to busbw, which is comparable with a wire's speed for any number of ranks.

        Source: NCCL Tests, doc/PERFORMANCE.md (https://github.com/NVIDIA/nccl-tests).
        """
        shares = {"all_reduce": 2.0, "reduce_scatter": 1.0, "all_gather": 1.0, "all_to_all": 1.0}
        if self.collective in _ROOTED:
            return 1.0
        return shares.get(self.collective, 0.0) * (self.ranks - 1) / self.ranks


def parse_size(text: str) -> int:
    """Return the bytes in `text`, like 64, 64B, 16KiB, 1MiB or 1.5GiB.

    Raises:
        ArgumentError: `text` is not a size, or not a whole number of bytes.
    """
    match = _SIZE.fullmatch(text.strip())
    size = 0.0 if match is None else float(match[1]) * _UNITS[(match[2] or "").lower()]
    if size < 1 or size != int(size):
        raise ArgumentError(f"{text!r} is not a size, want bytes, or a number and KiB, MiB or GiB, like 64,16KiB,1MiB")
    return int(size)


def size_text(size_bytes: int) -> str:
    """Return `size_bytes` as text that `parse_size` reads."""
    for unit, one in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size_bytes >= one and size_bytes % (one // 4) == 0:
            return f"{size_bytes / one:g} {unit}"
    return f"{size_bytes} B"
