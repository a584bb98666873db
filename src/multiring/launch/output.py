"""From the ranks' pipes to the launcher's own outputs: lines, tagged, in bounded memory."""

import contextlib
import os
import re
from collections import deque
from typing import IO, BinaryIO, Protocol

from multiring.launch.tracebacks import Piece, TracebackFolder

_LINE_BYTES = 1 << 16
RANKS_LINE_BYTES = 1 << 24  # a longer line of a rank is cut: memory is bounded, and docs/run.md says so
_READ_BYTES = 1 << 16
_DRAIN_READS = 64
_WRITE_BYTES = 4096  # PIPE_BUF: what poll promises a pipe takes without blocking
_QUEUE_BYTES = 1 << 20  # above this the ranks' pipes are not read any further, so that the ranks wait too
_LAST_LINES = 40
_LAST_LINE_BYTES = 2000
_ENDS = re.compile(rb"([\r\n])")


class LineTagger:
    """Puts `tag` before each line of a byte stream, and before what is written over it behind a carriage return.

    What is given out are whole lines only; but a line with a carriage return in it, a progress bar, is given out as it
    grows, and so is every line where `is_live`. `last_lines` holds the latest ones, untagged and cut to 2000 bytes
    each, of a bar its last state.
    """

    has_marks = False

    def __init__(self, tag: bytes, *, is_live: bool = False, line_bytes: int = _LINE_BYTES) -> None:
        self._tag = tag
        self._line_bytes = line_bytes
        self._is_live = is_live
        self._line = bytearray()  # the last one, from its last carriage return on
        self._shown = 0  # bytes of it that were given out
        self._grows = is_live  # whether it is given out before its end
        self._ends_in_return = False  # which is one over the line, or belongs to a newline
        self._was_interrupted = False
        self.last_lines: deque[bytes] = deque(maxlen=_LAST_LINES)

    def feed(self, data: bytes) -> bytes:
        """Return what is to be given out now; a line of more than `line_bytes` is broken into several."""
        out = bytearray()
        for token in _ENDS.split(data):
            if token == b"\n":
                self._end_line(out)
                continue
            if token and self._ends_in_return:
                self._ends_in_return = False
                self._show(out)
                out += b"\r"
                self._line, self._shown, self._grows = bytearray(), 0, True
            if token == b"\r":
                self._ends_in_return = True
            else:
                self._line += token
                self._cut(out)
        if self._grows:
            self._show(out)
        return bytes(out)

    def finish(self) -> bytes:
        """Return the last line where the stream did not end with a newline; it gets one."""
        out = bytearray()
        if self._line or self._ends_in_return:
            self._end_line(out)
        return bytes(out)

    def interrupt(self) -> None:
        """Hear that another's line has come into this one: what follows of it needs the tag again."""
        self._line, self._shown, self._was_interrupted = self._line[self._shown :], 0, True

    def _show(self, out: bytearray) -> None:
        if len(self._line) > self._shown:
            out += self._line[self._shown :] if self._shown else self._tag + self._line
            self._shown = len(self._line)

    def _cut(self, out: bytearray) -> None:
        while len(self._line) > self._line_bytes:
            rest, self._line = self._line[self._line_bytes :], self._line[: self._line_bytes]
            self._end_line(out)
            self._line = rest

    def _end_line(self, out: bytearray) -> None:
        self._line += b"\r" if self._ends_in_return else b""
        if self._line or not self._was_interrupted:
            out += (self._line[self._shown :] if self._shown else self._tag + self._line) + b"\n"
        self.last_lines.append(bytes(self._line[:_LAST_LINE_BYTES]))
        self._line, self._shown, self._grows = bytearray(), 0, self._is_live
        self._ends_in_return = self._was_interrupted = False


class Tagger(Protocol):
    """What makes a stream into tagged lines: LineTagger, or HostTagger for a stream of several ranks."""

    has_marks: bool  # whether what it is fed has marks in it that are for nobody else
    last_lines: deque[bytes]

    def feed(self, data: bytes) -> bytes:
        """Return what is to be given out now."""

    def finish(self) -> bytes:
        """Return what is left at the stream's end."""

    def interrupt(self) -> None:
        """Hear that another's line has come into the one that was given out last."""


class Outlet:
    """A queue before one of the launcher's own outputs, written when poll says that it takes more.

    The file descriptor is not made non-blocking: it is shared with whoever started us. Where standard output and error
    are one file, pipe or terminal, one outlet serves both, so that neither's lines come into the other's.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.failure_to_report: OSError | None = None
        self._is_broken = False
        self._queue = bytearray()
        self._within: Tagger | None = None  # whose unfinished line came last

    def add(self, data: bytes, tagger: Tagger | None = None) -> None:
        """Queue `data`; dropped where the output is broken.

        Args:
            data: whole lines, or what `tagger` gave out, who is told where another's line comes into its own.
            tagger: where `data` may end within a line.
        """
        if self._is_broken or not data:
            return
        if self._within is not None and self._within is not tagger:
            self._within.interrupt()
            if not data.startswith(b"\r"):  # a bar is written over the other one
                self._queue += b"\n"
        self._queue += data
        self._within = tagger if tagger is not None and not data.endswith(b"\n") else None

    @property
    def is_empty(self) -> bool:
        """Whether everything was written."""
        return not self._queue

    @property
    def is_full(self) -> bool:
        """Whether what feeds this outlet should wait."""
        return len(self._queue) > _QUEUE_BYTES

    def write_some(self) -> None:
        """Write once; to be called when the descriptor is writable."""
        try:
            del self._queue[: os.write(self.descriptor, self._queue[:_WRITE_BYTES])]
        except BlockingIOError:
            return
        except OSError as error:
            self.failure_to_report = error
            self._is_broken = True
            self._queue.clear()


def outlets() -> tuple[Outlet, Outlet]:
    """Return the outlets of standard output and standard error, which are one where both lead to the same place."""
    out, err = os.fstat(1), os.fstat(2)
    first = Outlet(1)
    is_one = (out.st_dev, out.st_ino, out.st_rdev) == (err.st_dev, err.st_ino, err.st_rdev)
    return first, first if is_one else Outlet(2)


class RankStream:
    """One rank's stdout or stderr: read from its pipe, tagged into an outlet, raw into its log file."""

    def __init__(
        self,
        pipe: IO[bytes],
        tagger: Tagger,
        outlet: Outlet,
        log: BinaryIO | None,
        folder: TracebackFolder | None = None,
    ) -> None:
        self._folder = folder
        self._pipe = pipe
        self._tagger = tagger
        self._log = log
        self.outlet = outlet
        self.log_failure: OSError | None = None
        os.set_blocking(pipe.fileno(), False)

    @property
    def descriptor(self) -> int:
        """What to poll; valid while open."""
        return self._pipe.fileno()

    @property
    def is_open(self) -> bool:
        """Whether more may come."""
        return not self._pipe.closed

    @property
    def last_lines(self) -> list[bytes]:
        """The latest lines, the unfinished one not among them."""
        return list(self._tagger.last_lines)

    def read_some(self) -> bool:
        """Read once; return whether there may be more right now. Closes at the end of the stream."""
        try:
            data = os.read(self._pipe.fileno(), _READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self.close()
            return False
        made = self._shown(data)
        if self._log is not None:
            try:
                self._log.write(made if self._tagger.has_marks else data)
            except OSError as error:
                self.log_failure = error
                self._close_log()
        return True

    def _shown(self, data: bytes) -> bytes:
        """Hand `data` on; return what it was made into."""
        made = b""
        for piece in [Piece(data)] if self._folder is None else self._folder.feed(data):
            lines = piece.data
            if piece.whose:
                self._tagger.last_lines.extend(lines.splitlines())
                last = lines.splitlines(keepends=True)[-1]
                lines = f"Traceback: as {piece.whose}'s, which is shown\n".encode() + last
            given = self._tagger.feed(lines)
            self.outlet.add(given, self._tagger)
            made += given
        return made

    def drain(self) -> None:
        """Read what its ended rank left in the pipe; whoever inherited the pipe may write on."""
        for _ in range(_DRAIN_READS):
            if not self.is_open or not self.read_some():
                return

    def close(self) -> None:
        """Give out what is left and close; may be called twice."""
        if self.is_open:
            left = b"" if self._folder is None else self._folder.finish()
            self.outlet.add(self._tagger.feed(left) + self._tagger.finish(), self._tagger)
            self._pipe.close()
            self._close_log()

    def _close_log(self) -> None:
        if self._log is not None:
            with contextlib.suppress(OSError):
                self._log.close()
            self._log = None
