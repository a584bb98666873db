"""The lines of several ranks that Hydra's mpiexec hands on in one stream, put together again rank by rank.

Hydra passes a rank's output on in the pieces in which it was written, and puts a pattern before each piece and each
line. With a pattern that nobody else writes, every byte is known to be of one rank, or of mpiexec itself.
"""

import re
from collections import deque

from multiring.launch.output import RANKS_LINE_BYTES, LineTagger

_MOST_DIGITS = 8


class HostTagger:
    """Does for the ranks of one stream what LineTagger does for one rank.

    Args:
        token: printable text that nobody else writes; `pattern` has it.
        is_live: whether lines are given out before they end.
    """

    has_marks = True  # what it is fed is nothing to show, nor to log

    def __init__(self, token: str, *, is_live: bool = False) -> None:
        self._is_live = is_live
        self._head = f"<{token}:".encode()
        self._mark = re.compile(re.escape(self._head) + rb"(\d{1,%d})>" % _MOST_DIGITS)
        self._held = b""  # what may be the beginning of a mark
        self._taggers: dict[int, LineTagger] = {}  # by rank; -1: mpiexec's own lines
        self._now = -1  # whose the next byte is
        self._open: LineTagger | None = None  # whose unfinished line was given out last
        self.last_lines: deque[bytes] = deque(maxlen=40)

    @property
    def pattern(self) -> str:
        """What Hydra is to put before each piece."""
        return f"{self._head.decode()}%r>"

    def feed(self, data: bytes) -> bytes:
        """Return what is to be given out now."""
        out = bytearray()
        data, self._held = self._held + data, b""
        at = 0
        for mark in self._mark.finditer(data):
            self._give(data[at : mark.start()], out)
            self._now, at = int(mark[1]), mark.end()
        rest = data[at:]
        begun = rest.rfind(b"<")
        if begun >= 0 and self._may_be_mark(rest[begun:]):
            rest, self._held = rest[:begun], rest[begun:]
        self._give(rest, out)
        return bytes(out)

    def finish(self) -> bytes:
        """Return the last lines where the stream did not end with a newline."""
        out = bytearray()
        held, self._held = self._held, b""
        self._give(held, out)
        for tagger in self._taggers.values():
            self._take(tagger, tagger.finish(), out)
        return bytes(out)

    def interrupt(self) -> None:
        """Hear that another's line has come into the one that was given out last."""
        if self._open is not None:
            self._open.interrupt()
            self._open = None

    def _may_be_mark(self, text: bytes) -> bool:
        if len(text) <= len(self._head):
            return self._head.startswith(text)
        number = text.removeprefix(self._head)
        return text.startswith(self._head) and len(number) <= _MOST_DIGITS and number.isdigit()

    def _give(self, text: bytes, out: bytearray) -> None:
        while text:
            end = text.find(b"\n") + 1 or len(text)
            tagger = self._taggers.get(self._now)
            if tagger is None:
                tag = b"[%d] " % self._now if self._now >= 0 else b""
                tagger = self._taggers[self._now] = LineTagger(tag, is_live=self._is_live, line_bytes=RANKS_LINE_BYTES)
                tagger.last_lines = self.last_lines
            self._take(tagger, tagger.feed(text[:end]), out)
            if text[end - 1 : end] == b"\n":
                self._now = -1  # a rank's next line has a mark
            text = text[end:]

    def _take(self, tagger: LineTagger, given: bytes, out: bytearray) -> None:
        if not given:
            return
        if self._open not in (None, tagger):
            self.interrupt()
            if not given.startswith(b"\r"):
                out += b"\n"
        out += given
        self._open = None if given.endswith(b"\n") else tagger
