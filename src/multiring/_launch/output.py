"""Copy the ranks' output to the launcher's output as tagged lines.

The copy uses a bounded amount of memory.
"""

import contextlib
import os
import re
from collections import deque
from typing import IO, BinaryIO, Protocol

from multiring._launch.terminal_writes import write_ready
from multiring._launch.tracebacks import Piece, TracebackFolder

_LINE_BYTES = 1 << 16
RANKS_LINE_BYTES = 1 << 24  # a longer line of a rank is broken up, to bound memory (docs/run.md names this limit)
_READ_BYTES = 1 << 16
_DRAIN_READS = 64
_WRITE_BYTES = 4096  # PIPE_BUF: a pipe that poll reports as writable takes this much without blocking
_QUEUE_BYTES = 1 << 20  # above this size the launcher stops reading the ranks' pipes, so the ranks wait too
_LAST_LINES = 40
_LAST_LINE_BYTES = 2000
_ENDS = re.compile(rb"([\r\n])")


class LineTagger:
    """Puts `tag` before each line of a byte stream.

    The object also puts `tag` behind each carriage return within a line.

    The methods return whole lines. Two kinds of lines are returned as they grow: a line with a carriage return, which
    is a progress bar, and every line if `is_live`. `last_lines` holds the latest lines, untagged and cut to 2000 bytes
    each. For a progress bar, `last_lines` holds the last state.
    """

    has_marks = False

    def __init__(self, tag: bytes, *, is_live: bool = False, line_bytes: int = _LINE_BYTES) -> None:
        self._tag = tag
        self._line_bytes = line_bytes
        self._is_live = is_live
        self._line = bytearray()  # the current line, after its last carriage return
        self._shown = 0  # the number of bytes of the current line that were returned already
        self._grows = is_live  # whether to return the beginning of the current line before its end
        self._ends_in_return = False  # the next byte decides: "\r\n" ends the line, a lone "\r" overwrites the line
        self._was_interrupted = False
        self.last_lines: deque[bytes] = deque(maxlen=_LAST_LINES)

    def feed(self, data: bytes) -> bytes:
        """Take `data` and return the output that is ready.

        A line of more than `line_bytes` is broken up.
        """
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
        """Return the last line with a newline if the stream ended without a newline."""
        out = bytearray()
        if self._line or self._ends_in_return:
            self._end_line(out)
        return bytes(out)

    def interrupt(self) -> None:
        """Record that other output follows the unfinished line.

        The rest of the line gets a new tag.
        """
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
    """Turns a stream into tagged lines.

    LineTagger is for the stream of one rank, and HostTagger for a stream of several ranks.
    """

    has_marks: bool  # whether the input contains marks that must not be shown or logged
    last_lines: deque[bytes]

    def feed(self, data: bytes) -> bytes:
        """Take `data` and return the output that is ready."""

    def finish(self) -> bytes:
        """Return the rest of the output at the end of the stream."""

    def interrupt(self) -> None:
        """Record that other output follows the unfinished line returned last."""


class Sink(Protocol):
    """Where the output of a process goes: an Outlet, or the connection of an agent."""

    @property
    def is_full(self) -> bool:
        """Whether no more output should be added at the moment."""

    def add(self, data: bytes, tagger: Tagger | None = None) -> None:
        """Take `data`, made by `tagger`."""


class Untagged:
    """Returns a stream unchanged, for another process that puts tags before its lines."""

    has_marks = False

    def __init__(self) -> None:
        self.last_lines: deque[bytes] = deque(maxlen=0)

    def feed(self, data: bytes) -> bytes:
        """Return `data`."""
        return data

    def finish(self) -> bytes:
        """Return nothing."""
        return b""

    def interrupt(self) -> None:
        """Do nothing."""


class Outlet:
    """A queue for one of the launcher's own outputs.

    The loop writes from it when poll reports the output writable.

    The file descriptor stays blocking, because the parent process shares it. If standard output and error are the same
    file, pipe or terminal, one outlet serves both. Then a line of one stream cannot break a line of the other.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.failure_to_report: OSError | None = None
        self._is_broken = False
        self._queue = bytearray()
        self._within: Tagger | None = None  # the tagger of the unfinished line at the end of the queue

    def add(self, data: bytes, tagger: Tagger | None = None) -> None:
        """Queue `data` for writing, or drop it if the output is broken.

        Args:
            data: whole lines, or output of `tagger`.
            tagger: must be given if `data` may end within a line. Its `interrupt` is called if other output follows
                before the line ends.
        """
        if self._is_broken or not data:
            return
        if self._within is not None and self._within is not tagger:
            self._within.interrupt()
            if not data.startswith(b"\r"):  # a progress bar overwrites the other line instead of ending it
                self._queue += b"\n"
        self._queue += data
        self._within = tagger if tagger is not None and not data.endswith(b"\n") else None

    @property
    def is_empty(self) -> bool:
        """Whether all queued data was written."""
        return not self._queue

    @property
    def is_full(self) -> bool:
        """Whether the queue is above its limit.

        Then callers should wait before they add more.
        """
        return len(self._queue) > _QUEUE_BYTES

    def write_some(self) -> None:
        """Write some of the queue. Call it when the descriptor is writable."""
        try:
            del self._queue[: write_ready(self.descriptor, self._queue[:_WRITE_BYTES])]
        except BlockingIOError:
            return
        except OSError as error:
            self.failure_to_report = error
            self._is_broken = True
            self._queue.clear()


def outlets() -> tuple[Outlet, Outlet]:
    """Return the outlets of standard output and error.

    If both are the same file, the same outlet is returned twice.
    """
    out, err = os.fstat(1), os.fstat(2)
    first = Outlet(1)
    is_one = (out.st_dev, out.st_ino, out.st_rdev) == (err.st_dev, err.st_ino, err.st_rdev)
    return first, first if is_one else Outlet(2)


class RankOutput(Protocol):
    """The stdout or stderr of one process of the job."""

    log_failure: OSError | None

    @property
    def last_lines(self) -> list[bytes]:
        """The latest complete lines."""

    def drain(self) -> None:
        """Take the data that an ended process has left."""

    def close(self) -> None:
        """Pass the rest of the output on."""


class ShownOutput:
    """Shows a process's stdout or stderr.

    The tagged lines go to an outlet. The log file gets the raw bytes, or the tagged lines if the raw bytes contain
    marks.
    """

    def __init__(
        self, tagger: Tagger, outlet: Sink, log: BinaryIO | None, folder: TracebackFolder | None = None
    ) -> None:
        self._folder = folder
        self._tagger = tagger
        self._log = log
        self.outlet = outlet
        self.log_failure: OSError | None = None

    @property
    def last_lines(self) -> list[bytes]:
        """The latest complete lines."""
        return list(self._tagger.last_lines)

    def take(self, data: bytes) -> None:
        """Show the next bytes of the stream."""
        made = self._shown(data)
        if self._log is not None:
            try:
                self._log.write(made if self._tagger.has_marks else data)
            except OSError as error:
                self.log_failure = error
                self._close_log()

    def _shown(self, data: bytes) -> bytes:
        """Tag `data`, add the result to the outlet, and return the result."""
        made = b""
        for piece in [Piece(data)] if self._folder is None else self._folder.feed(data):
            lines = piece.data
            if piece.whose:
                self._tagger.last_lines.extend(lines.splitlines())
                last = lines.splitlines(keepends=True)[-1]
                lines = f"Traceback: the same as the one shown for {piece.whose}\n".encode() + last
            given = self._tagger.feed(lines)
            self.outlet.add(given, self._tagger)
            made += given
        return made

    def drain(self) -> None:
        """Do nothing: the data comes through `take`."""

    def close(self) -> None:
        """Pass the rest of the output to the outlet, and close the log.

        A second call has no effect.
        """
        left = b"" if self._folder is None else self._folder.finish()
        self.outlet.add(self._tagger.feed(left) + self._tagger.finish(), self._tagger)
        self._close_log()

    def _close_log(self) -> None:
        if self._log is not None:
            with contextlib.suppress(OSError):
                self._log.close()
            self._log = None


class RankStream:
    """One rank's stdout or stderr, which is read from a pipe and passed to `output`."""

    def __init__(self, pipe: IO[bytes], output: ShownOutput) -> None:
        self._pipe = pipe
        self._output = output
        os.set_blocking(pipe.fileno(), False)

    @property
    def outlet(self) -> Sink:
        """The outlet of the output."""
        return self._output.outlet

    @property
    def log_failure(self) -> OSError | None:
        """The error that cut off the log, until it is reported."""
        return self._output.log_failure

    @log_failure.setter
    def log_failure(self, failure: OSError | None) -> None:
        self._output.log_failure = failure

    @property
    def descriptor(self) -> int:
        """The file descriptor to poll, valid while the stream is open."""
        return self._pipe.fileno()

    @property
    def is_open(self) -> bool:
        """Whether the stream may still deliver data."""
        return not self._pipe.closed

    @property
    def last_lines(self) -> list[bytes]:
        """The latest complete lines."""
        return self._output.last_lines

    def read_some(self) -> bool:
        """Read once and return whether more data may be ready.

        At the end of the stream, close it.
        """
        try:
            data = os.read(self._pipe.fileno(), _READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self.close()
            return False
        self._output.take(data)
        return True

    def drain(self) -> None:
        """Read the data that the ended rank left in the pipe.

        The number of reads is bounded, because children of the rank may still write.
        """
        for _ in range(_DRAIN_READS):
            if not self.is_open or not self.read_some():
                return

    def close(self) -> None:
        """Pass the rest of the output to the outlet and close the stream.

        A second call has no effect.
        """
        if self.is_open:
            self._output.close()
            self._pipe.close()
