"""Show equal tracebacks of several ranks only once.

For the other ranks, only the last line is shown.

All ranks of a job run one program. Most mistakes, such as a wrong setting or a missing file, occur on every rank. The
first rank's traceback names the place. Many copies of the traceback would hide other output.
"""

import hashlib
import re
from typing import NamedTuple

_HEAD = re.compile(
    rb"(?:\[rank\d+\]: )?Traceback \(most recent call last\):\r?$"
)  # torch's excepthook writes the rank first
_LINES = re.compile(rb"[^\n]*\n|[^\n]+")
_RANK = re.compile(rb"^\[rank\d+\]: ", re.MULTILINE)
_MOST_BYTES = 1 << 18
_LEAST_LINES = 6  # show a shorter traceback always in full


class Piece(NamedTuple):
    """A part of a stream.

    If `whose` names another rank, the part is a traceback that the other rank showed first.
    """

    data: bytes
    whose: str = ""


class Tracebacks:
    """The digests of all shown tracebacks, each with the rank that showed it first."""

    def __init__(self) -> None:
        self._shown: dict[bytes, str] = {}

    def first_with(self, text: bytes, name: str) -> str:
        """Return the rank that showed this traceback first.

        A new traceback is recorded under `name`.

        The whole text is compared, because tracebacks that share only the last line belong to different mistakes.
        """
        plain = _RANK.sub(b"", text).replace(b"\r\n", b"\n")
        return self._shown.setdefault(hashlib.blake2b(plain, digest_size=16).digest(), name)


class TracebackFolder:
    """Finds the tracebacks in the standard error stream of one rank.

    Args:
        tracebacks: the record of tracebacks, shared by all ranks.
        name: this rank's name. Other ranks' output refers to it.
    """

    def __init__(self, tracebacks: Tracebacks, name: str) -> None:
        self._tracebacks, self._name = tracebacks, name
        self._held = bytearray()  # an incomplete traceback
        self._lines = 0
        self._partial = b""  # the beginning of a line that may belong to a traceback
        self._is_within = False  # whether the beginning of the current line was returned already

    def feed(self, data: bytes) -> list[Piece]:
        """Take `data` and return the pieces that can be shown now."""
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
        """Return the data held back so far. Call it at the end of the stream."""
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
