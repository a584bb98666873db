"""One rank's recording for a timeline, written to a part file.

The part has events of the native core and spans of the program. A thread writes the part several times a second. If the
rank is killed, its part lacks only the last moment.
"""

import contextlib
import fcntl
import json
import logging
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from multiring._native import Context
from multiring.trace import Claim, ClockReading, Glossary, Spans, block, start_spans, stop_spans
from multiring.trace.part import OPERATION, ROW

_log = logging.getLogger("multiring")
# The native core buffers a million rows, so rows are lost only at more than four million rows per second.
_PERIOD_S = 0.25
# Rewrite the preview soon after an event, but spend at most this share of the time on writing.
_PREVIEW_PERIOD_S = 0.02
_PREVIEW_SHARE = 0.01
_DEVICES_S = 1.0  # how long the end of a recording waits for operations that devices still do
Preview = Callable[[bytes], None]


class Recording:
    """One rank's part of a timeline.

    Events are written to it between `begin` and `end`.

    Args:
        claim: the part's file, empty and locked.
        context: the native context whose operations are recorded.
        glossary: the titles of the operations.
        who: the fields of the part's start block.
    """

    def __init__(self, claim: Claim, context: Context, glossary: Glossary, who: dict[str, Any]) -> None:
        self.path = claim.path
        self._context = context
        self._glossary = glossary
        self._spans = Spans()
        self._told: set[int] = set()  # the digests and groups whose titles are in the part already
        self._good_bytes = 0
        self._rails_due_s = 0.0
        self._fault = ""
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None
        self._file = claim.take()
        self._write(block("start", **who))

    def note(self, reading: ClockReading) -> None:
        """Write a measured offset of rank 0's clock from this rank's clock into the part."""
        fields = {"at_ns": reading.at_ns, "offset_ns": reading.offset_ns, "error_ns": reading.error_ns}
        self._write(block("reading", **fields))

    def begin(self, preview: Preview | None = None) -> None:
        """Start to record.

        Args:
            preview: called from time to time with the contents of the part so far. It may raise OSError, which ends
                the previews.

        Raises:
            StateError: this process is already recording spans.
        """
        self._spans = start_spans()
        self._context.keep_timeline(True)
        self._look_at_rails(time.monotonic())
        run = self._run if preview is None else partial(self._run_with, preview)
        self._thread = threading.Thread(target=run, name="multiring timeline", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Stop recording, and write everything recorded so far to the part."""
        stop_spans()
        self._context.keep_timeline(False)
        self._is_over.set()
        if self._thread is not None:
            self._thread.join()
        self._drain()
        self._look_at_rails(time.monotonic())

    def data(self) -> bytes:
        """Write the part's end block and return the contents of the part.

        Call `end` first.
        """
        end = {"at_ns": time.monotonic_ns(), "dropped": self._context.dropped_from_timeline(), "fault": self._fault}
        self._write(block("end", **end))
        whole = self._so_far()
        return whole + block("end", **{**end, "fault": self._fault}) if self._fault else whole

    def _so_far(self) -> bytes:
        with self.path.open("rb") as file:
            return file.read(self._good_bytes)

    def close(self) -> None:
        """Close the part's file, which stays on disk."""
        if self._file >= 0:
            with contextlib.suppress(OSError):  # the file system may not support locks
                fcntl.flock(self._file, fcntl.LOCK_UN)  # forks of this process also hold the lock
            os.close(self._file)
            self._file = -1

    def remove(self) -> None:
        """Remove the part's file."""
        # Remove the file while it is locked, because afterwards it may belong to another job.
        if self._file >= 0:
            self.path.unlink(missing_ok=True)
        self.close()

    def _run(self) -> None:
        while not self._is_over.wait(_PERIOD_S):
            self._read_devices()
            self._drain()
        self._read_devices(_DEVICES_S)

    def _run_with(self, preview: Preview) -> None:
        shown_bytes, next_s = -1, 0.0
        while not self._is_over.wait(_PREVIEW_PERIOD_S):
            self._read_devices()
            self._drain()
            start_s = time.monotonic()
            if self._good_bytes == shown_bytes or start_s < next_s:
                continue
            shown_bytes = self._good_bytes
            try:
                preview(self._so_far())
            except OSError as error:
                _log.warning("the timeline cannot be shown before its end: %s", error)
                self._run()
                return
            now_s = time.monotonic()
            next_s = now_s + (now_s - start_s) / _PREVIEW_SHARE
        self._read_devices(_DEVICES_S)

    def _read_devices(self, patience_s: float = 0.0) -> None:
        for source in list(self._spans.sources):
            source(self._spans, patience_s)

    def _drain(self) -> None:
        rows = self._context.take_timeline()
        spans = self._spans.take()
        if rows:
            words = self._words(rows)
            self._write((block("words", words) if words else b"") + block("rows", rows))
        if spans:
            self._write(block("spans", json.dumps(spans).encode()))
        if pieces := self._spans.take_devices():
            self._write(block("devices", json.dumps(pieces).encode()))
        now_s = time.monotonic()
        if now_s >= self._rails_due_s:
            self._look_at_rails(now_s)

    def _look_at_rails(self, now_s: float) -> None:
        self._rails_due_s = now_s + _PERIOD_S
        rails = [(peer, rail, carried) for peer, rail, _, carried, _ in self._context.rails()]
        if rails:
            self._write(block("rails", json.dumps(rails).encode(), at_ns=time.monotonic_ns()))

    def _words(self, rows: bytes) -> bytes:
        """Return the titles of operations and groups that are new in `rows`, as JSON."""
        table = np.frombuffer(rows, ROW)
        operations = table[table["kind"] == OPERATION]
        digests = set(np.unique(operations["digest"]).tolist()) - self._told
        groups = set(np.unique(operations["group"]).tolist()) - self._told
        self._told |= digests | groups
        found = {digest: self._glossary.find(digest) for digest in digests}
        words = {
            "operations": {str(digest): words for digest, words in found.items() if words is not None},
            "groups": {str(group): self._glossary.groups[group] for group in groups if group in self._glossary.groups},
        }
        return json.dumps(words).encode() if any(words.values()) else b""

    def _write(self, data: bytes) -> None:
        """Write whole blocks to the part.

        After the first write error nothing more is written.
        """
        if self._fault:
            return
        left = memoryview(data)
        try:
            while left:
                left = left[os.write(self._file, left) :]
        except OSError as error:
            self._fault = f"{self.path} cannot be written: {error.strerror}"
            self._context.keep_timeline(False)
            _log.warning("%s; this rank's later events are not in the timeline", self._fault)
            return
        self._good_bytes += len(data)
