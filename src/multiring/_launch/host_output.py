"""Split the output stream of Hydra's mpiexec into the lines of each rank.

Hydra passes the ranks' output on in the pieces in which it was written. It puts a pattern before each piece and each
line. The launcher chooses a random pattern, so every byte can be assigned to a rank or to mpiexec itself.
"""

import re
from collections import deque

from multiring._launch.output import RANKS_LINE_BYTES, LineTagger

_MOST_DIGITS = 8


class HostTagger:
    """Tags the lines of several ranks in one stream; LineTagger tags the lines of one rank.

    Args:
        token: a random printable text, which `pattern` contains.
        is_live: whether to return the beginning of a line before the line ends.
    """

    has_marks = True  # the input contains Hydra's patterns, which must not be shown or logged

    def __init__(self, token: str, *, is_live: bool = False) -> None:
        self._is_live = is_live
        self._head = f"<{token}:".encode()
        self._mark = re.compile(re.escape(self._head) + rb"(\d{1,%d})>" % _MOST_DIGITS)
        self._held = b""  # bytes that may be the beginning of one of Hydra's patterns
        self._taggers: dict[int, LineTagger] = {}  # rank -> its tagger; -1 is mpiexec itself
        self._now = -1  # the rank that wrote the next byte
        self._open: LineTagger | None = None  # the tagger that returned the latest unfinished line
        self.last_lines: deque[bytes] = deque(maxlen=40)

    @property
    def pattern(self) -> str:
        """The pattern that Hydra must put before each piece."""
        return f"{self._head.decode()}%r>"

    def feed(self, data: bytes) -> bytes:
        """Take the next bytes of the stream and return the tagged output that is ready."""
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
        """Return the rest at the end of the stream: lines without a newline."""
        out = bytearray()
        held, self._held = self._held, b""
        self._give(held, out)
        for tagger in self._taggers.values():
            self._take(tagger, tagger.finish(), out)
        return bytes(out)

    def interrupt(self) -> None:
        """Record that other output follows the unfinished line returned last."""
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
                self._now = -1  # a rank's next line begins with a mark
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
