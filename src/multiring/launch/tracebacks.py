"""One mistake is printed once: a traceback that is another rank's, too, is shown by its last line alone.

The ranks of a job run one program, and most mistakes are all ranks': a wrong setting, a file that is not there. The
traceback of the first rank says where; sixteen of them hide what is behind them.
"""

import hashlib
import re
from typing import NamedTuple

_HEAD = re.compile(rb"(?:\[rank\d+\]: )?Traceback \(most recent call last\):\r?$")  # torch's hook names the rank
_LINES = re.compile(rb"[^\n]*\n|[^\n]+")
_RANK = re.compile(rb"^\[rank\d+\]: ", re.MULTILINE)
_MOST_BYTES = 1 << 18
_LEAST_LINES = 6  # a shorter one is shown as it is


class Piece(NamedTuple):
    """A part of a stream: to be shown as it is, or, where `whose` names a rank, a traceback that it had first."""

    data: bytes
    whose: str = ""


class Tracebacks:
    """Digests of the tracebacks that were shown, and of which rank."""

    def __init__(self) -> None:
        self._shown: dict[bytes, str] = {}

    def first_with(self, text: bytes, name: str) -> str:
        """Return the rank that had this traceback first: `name` itself, from now on, where none had.

        Tracebacks that only end alike are of different mistakes: each of them says where its own is.
        """
        plain = _RANK.sub(b"", text).replace(b"\r\n", b"\n")
        return self._shown.setdefault(hashlib.blake2b(plain, digest_size=16).digest(), name)


class TracebackFolder:
    """Finds the tracebacks in what one rank writes to standard error.

    Args:
        tracebacks: those of all ranks.
        name: of this rank, for others' lines.
    """

    def __init__(self, tracebacks: Tracebacks, name: str) -> None:
        self._tracebacks, self._name = tracebacks, name
        self._held = bytearray()  # a traceback as far as it has come
        self._lines = 0
        self._partial = b""  # the beginning of a line, which may begin a traceback
        self._is_within = False  # the line that comes has been shown in part

    def feed(self, data: bytes) -> list[Piece]:
        """Return what can be shown now."""
        out: list[Piece] = []
        plain = bytearray()
        for line in _LINES.findall(self._partial + data):
            self._partial = b""
            if not line.endswith(b"\n") and (self._held or self._may_begin(line)):
                self._partial = line
            elif self._held:
                self._take(line, plain, out)
            elif not self._is_within and _HEAD.match(line.rstrip(b"\n")):
                self._held += line
                self._lines = 1
            else:
                plain += line
                self._is_within = not line.endswith(b"\n")
        if len(self._held) + len(self._partial) > _MOST_BYTES:
            plain += self._held + self._partial
            self._held, self._partial = bytearray(), b""
            self._is_within = not plain.endswith(b"\n")
        if plain:
            out.append(Piece(bytes(plain)))
        return out

    def finish(self) -> bytes:
        """Return what was held back, at the end of the stream."""
        left = bytes(self._held) + self._partial
        self._held, self._partial = bytearray(), b""
        return left

    def _may_begin(self, line: bytes) -> bool:
        return not self._is_within and len(line) < 60 and (line[:1] in (b"T", b"["))

    def _take(self, line: bytes, plain: bytearray, out: list[Piece]) -> None:
        text = _RANK.sub(b"", line)
        self._held += line
        self._lines += 1
        if text[:1] in (b" ", b"\t", b"\n", b"\r"):
            return
        whole, self._held = bytes(self._held), bytearray()
        whose = self._tracebacks.first_with(whole, self._name)
        if whose == self._name or self._lines < _LEAST_LINES:
            plain += whole
            return
        if plain:
            out.append(Piece(bytes(plain)))
            plain.clear()
        out.append(Piece(whole, whose))
