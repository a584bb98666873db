"""The output of a job that outlives its launcher: written to the launcher's, or kept while there is none."""

import os
import selectors
import time

from multiring._launch.terminal_writes import write_ready

_READ_BYTES = 1 << 16
_DRAIN_READS = 64
_WRITE_BYTES = 4096  # PIPE_BUF: a pipe that poll reports as writable takes this much without blocking
_MOST_BYTES = 1 << 20
_LOSS_SEEN_S = 0.5  # a launcher that was killed together with its output's reader is lost by then


class KeptOutput:
    """One output of the job's process, on its way to a descriptor of the launcher.

    While the job has a launcher, the job waits for a slow reader, learns that a reader has gone, and goes on without
    output on a full disk, as without a keeper. While it has none, the job never waits: what cannot be written is kept,
    the last 1 MiB of it.

    Args:
        descriptor: where to write to, 1 or 2 of this process. Another file may take its place later.
    """

    def __init__(self, descriptor: int) -> None:
        self.reading, self.writing = os.pipe()  # the job's process gets `writing`
        os.set_blocking(self.reading, False)
        self._descriptor = descriptor
        self._queue = bytearray()
        self._dropped = 0
        self._failure: OSError | None = None  # why nothing can be written
        self._broken_s = 0.0  # when this was found
        self._is_cut = False  # whether all output is dropped
        self._ends_line = True  # what was queued last

    @property
    def is_written(self) -> bool:
        """Whether all that could be written has been."""
        return not self._queue or self._failure is not None

    def begin(self) -> None:
        """Close the end that the job's process writes to, once that has it."""
        os.close(self.writing)

    def watch(self, poll: selectors.BaseSelector, *, has_launcher: bool) -> None:
        """Register with `poll` what is wanted now."""
        if self.reading >= 0 and not (has_launcher and len(self._queue) > _MOST_BYTES):
            poll.register(self.reading, selectors.EVENT_READ, self._read)
        if self._queue and self._failure is None:
            poll.register(self._descriptor, selectors.EVENT_WRITE, self._write)

    def act(self, *, has_launcher: bool) -> str:
        """Drop what is too much without a launcher; with one, tell the job that the output's reader has gone.

        Return why all output is dropped from now on; nothing if it is not, or was before.
        """
        self._is_cut &= has_launcher  # the next launcher may write it elsewhere
        if not has_launcher and len(self._queue) > _MOST_BYTES:
            cut = self._queue.find(b"\n", len(self._queue) - _MOST_BYTES) + 1 or len(self._queue) - _MOST_BYTES
            self._drop(cut)
        failure, at = self._failure, self.acts_at
        if failure is None or at is None or not has_launcher or time.monotonic() < at:
            return ""
        if isinstance(failure, BrokenPipeError):
            self.close()  # the job's process gets EPIPE, and ends the job as without a keeper
            return ""
        self._is_cut = True
        self._drop(len(self._queue))
        return failure.strerror or str(failure)

    @property
    def acts_at(self) -> float | None:
        """When `act` has something to do."""
        is_done = self._failure is None or self._is_cut or self.reading < 0
        return None if is_done else self._broken_s + _LOSS_SEEN_S

    def say(self, text: str) -> None:
        """Add a line of the keeper."""
        self._add(b"" if self._ends_line else b"\n")
        self._add(f"multiring: {text}\n".encode())

    def turn_to(self, descriptor: int) -> None:
        """Write to another file from now on, first what was kept."""
        os.dup2(descriptor, self._descriptor)
        self._failure, self._is_cut = None, False
        if self._dropped:
            self._queue[:0] = f"multiring: {self._dropped} bytes of the output before this are lost\n".encode()
            self._dropped = 0

    def drain(self) -> None:
        """Take what the job's process has left. The reads are bounded, because what it has started may write on."""
        for _ in range(_DRAIN_READS):
            if self.reading < 0 or not self._read():
                return

    def close(self) -> None:
        """Take nothing any more. A second call has no effect."""
        if self.reading >= 0:
            os.close(self.reading)
            self.reading = -1

    def _add(self, data: bytes) -> None:
        self._queue += data
        self._ends_line = data.endswith(b"\n") if data else self._ends_line
        if self._is_cut:
            self._drop(len(self._queue))

    def _drop(self, count: int) -> None:
        self._dropped += count
        del self._queue[:count]

    def _read(self) -> bool:
        try:
            data = os.read(self.reading, _READ_BYTES)
        except BlockingIOError:
            return False
        self._add(data)
        if not data:
            self.close()
        return bool(data)

    def _write(self) -> None:
        try:
            del self._queue[: write_ready(self._descriptor, self._queue[:_WRITE_BYTES])]
        except BlockingIOError:
            pass
        except OSError as error:
            self._failure, self._broken_s = error, time.monotonic()


def outputs() -> list[KeptOutput]:
    """Return the outputs for this process's standard output and error; one for both if they are the same file."""
    out, err = os.fstat(1), os.fstat(2)
    is_one = (out.st_dev, out.st_ino, out.st_rdev) == (err.st_dev, err.st_ino, err.st_rdev)
    return [KeptOutput(1)] if is_one else [KeptOutput(1), KeptOutput(2)]
