"""From the ranks' pipes to the launcher's own outputs: whole lines, tagged, in bounded memory."""

import contextlib
import os
from collections import deque
from typing import IO, BinaryIO

_LINE_BYTES = 1 << 16  # a longer line is cut: nobody else's output must wait for its end
_READ_BYTES = 1 << 16
_DRAIN_READS = 64
_WRITE_BYTES = 4096  # PIPE_BUF: what poll promises a pipe takes without blocking
_QUEUE_BYTES = 1 << 20  # above this the ranks' pipes are not read any further, so that the ranks wait too
_LAST_LINES = 40
_LAST_LINE_BYTES = 2000


class LineTagger:
    """Puts `tag` before each line of a byte stream and gives out whole lines only.

    `last_lines` holds the latest ones, untagged and cut to 2000 bytes each.
    """

    def __init__(self, tag: bytes) -> None:
        self._tag = tag
        self._held = b""
        self.last_lines: deque[bytes] = deque(maxlen=_LAST_LINES)

    def feed(self, data: bytes) -> bytes:
        """Return what is complete now; a line of more than 64 KiB is broken into several."""
        *lines, rest = (self._held + data).split(b"\n")
        while len(rest) > _LINE_BYTES:
            lines.append(rest[:_LINE_BYTES])
            rest = rest[_LINE_BYTES:]
        self._held = rest
        return self._tagged(lines)

    def finish(self) -> bytes:
        """Return the last line where the stream did not end with a newline; it gets one."""
        rest, self._held = self._held, b""
        return self._tagged([rest] if rest else [])

    def _tagged(self, lines: list[bytes]) -> bytes:
        self.last_lines.extend(line[:_LAST_LINE_BYTES] for line in lines)
        return b"".join(self._tag + line + b"\n" for line in lines)


class Outlet:
    """A queue before one of the launcher's own outputs, written when poll says that it takes more.

    The file descriptor is not made non-blocking: it is shared with whoever started us.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.failure_to_report: OSError | None = None
        self._is_broken = False
        self._queue = bytearray()

    def add(self, data: bytes) -> None:
        """Queue `data`; dropped where the output is broken."""
        if not self._is_broken:
            self._queue += data

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


class RankStream:
    """One rank's stdout or stderr: read from its pipe, tagged into an outlet, raw into its log file."""

    def __init__(self, pipe: IO[bytes], tag: bytes, outlet: Outlet, log: BinaryIO | None) -> None:
        self._pipe = pipe
        self._tagger = LineTagger(tag)
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
        self.outlet.add(self._tagger.feed(data))
        if self._log is not None:
            try:
                self._log.write(data)
            except OSError as error:
                self.log_failure = error
                self._close_log()
        return True

    def drain(self) -> None:
        """Read what its ended rank left in the pipe; whoever inherited the pipe may write on."""
        for _ in range(_DRAIN_READS):
            if not self.is_open or not self.read_some():
                return

    def close(self) -> None:
        """Give out what is left and close; may be called twice."""
        if self.is_open:
            self.outlet.add(self._tagger.finish())
            self._pipe.close()
            self._close_log()

    def _close_log(self) -> None:
        if self._log is not None:
            with contextlib.suppress(OSError):
                self._log.close()
            self._log = None
