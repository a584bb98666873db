"""The output of a job that outlives its launcher: written to the launcher's, or kept while there is none."""

import os
import selectors
import time

_READ_BYTES = 1 << 16
_WRITE_BYTES = 4096  # PIPE_BUF: a pipe that poll reports as writable takes this much without blocking
_MOST_BYTES = 1 << 20
_LOSS_SEEN_S = 0.5  # a launcher that was killed together with its output's reader is lost by then


class KeptOutput:
    """One output of the job's process, on its way to a descriptor of the launcher.

    While the job has a launcher, the job waits for a slow reader, and learns that a reader has gone, as without a
    keeper. While it has none, the job never waits: what cannot be written is kept, the last 1 MiB of it.

    Args:
        descriptor: where to write to, 1 or 2 of this process. Another file may take its place later.
    """

    def __init__(self, descriptor: int) -> None:
        self.reading, self.writing = os.pipe()  # the job's process gets `writing`
        os.set_blocking(self.reading, False)
        self._descriptor = descriptor
        self._queue = bytearray()
        self._dropped = 0
        self._broken_s: float | None = None  # when the reader was found to have gone
        self._ends_line = True  # what was queued last

    @property
    def is_written(self) -> bool:
        """Whether all that could be written has been."""
        return not self._queue or self._broken_s is not None

    def begin(self) -> None:
        """Close the end that the job's process writes to, once that has it."""
        os.close(self.writing)

    def watch(self, poll: selectors.BaseSelector, *, has_launcher: bool) -> None:
        """Register with `poll` what is wanted now."""
        if self.reading >= 0 and not (has_launcher and len(self._queue) > _MOST_BYTES):
            poll.register(self.reading, selectors.EVENT_READ, self._read)
        if self._queue and self._broken_s is None:
            poll.register(self._descriptor, selectors.EVENT_WRITE, self._write)

    def act(self, *, has_launcher: bool) -> None:
        """Drop what is too much without a launcher; with one, tell the job that the output's reader has gone."""
        if not has_launcher and len(self._queue) > _MOST_BYTES:
            cut = self._queue.find(b"\n", len(self._queue) - _MOST_BYTES) + 1 or len(self._queue) - _MOST_BYTES
            self._dropped += cut
            del self._queue[:cut]
        if has_launcher and self._broken_s is not None and time.monotonic() >= self._broken_s + _LOSS_SEEN_S:
            self.close()  # the job's process gets EPIPE, and ends the job as without a keeper

    @property
    def acts_at(self) -> float | None:
        """When `act` has something to do."""
        return None if self._broken_s is None or self.reading < 0 else self._broken_s + _LOSS_SEEN_S

    def say(self, text: str) -> None:
        """Add a line of the keeper."""
        self._add(b"" if self._ends_line else b"\n")
        self._add(f"multiring: {text}\n".encode())

    def turn_to(self, descriptor: int) -> None:
        """Write to another file from now on, first what was kept."""
        os.dup2(descriptor, self._descriptor)
        self._broken_s = None
        if self._dropped:
            self._queue[:0] = f"multiring: {self._dropped} bytes of the output before this are lost\n".encode()
            self._dropped = 0

    def drain(self) -> None:
        """Take what the job's process has left."""
        while self.reading >= 0 and self._read():
            continue

    def close(self) -> None:
        """Take nothing any more. A second call has no effect."""
        if self.reading >= 0:
            os.close(self.reading)
            self.reading = -1

    def _add(self, data: bytes) -> None:
        self._queue += data
        self._ends_line = data.endswith(b"\n") if data else self._ends_line

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
            del self._queue[: os.write(self._descriptor, self._queue[:_WRITE_BYTES])]
        except BlockingIOError:
            pass
        except OSError:
            self._broken_s = time.monotonic()


def outputs() -> list[KeptOutput]:
    """Return the outputs for this process's standard output and error; one for both if they are the same file."""
    out, err = os.fstat(1), os.fstat(2)
    is_one = (out.st_dev, out.st_ino, out.st_rdev) == (err.st_dev, err.st_ino, err.st_rdev)
    return [KeptOutput(1)] if is_one else [KeptOutput(1), KeptOutput(2)]
