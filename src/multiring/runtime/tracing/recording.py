"""What one rank records for a timeline: from the native core and from the program, into its part of the timeline.

A thread writes the part several times a second: what a rank that is killed did until a moment before is in it.
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
from multiring.trace import Claim, Glossary, Reading, Spans, block, start_spans, stop_spans
from multiring.trace.part import OPERATION, ROW

_log = logging.getLogger("multiring")
# The native core keeps a million rows in between: a rank would have to make four million a second.
_PERIOD_S = 0.25
# With a preview, which is written anew each time: soon after something happened, but at most this share of the time.
_PREVIEW_PERIOD_S = 0.02
_PREVIEW_SHARE = 0.01
Preview = Callable[[bytes], None]


class Recording:
    """One rank's part of a timeline, and what is written to it from `begin` to `end`.

    Args:
        claim: the part's file, empty and held.
        context: whose operations are recorded.
        glossary: what they are called.
        who: the part's start block.
    """

    def __init__(self, claim: Claim, context: Context, glossary: Glossary, who: dict[str, Any]) -> None:
        self.path = claim.path
        self._context = context
        self._glossary = glossary
        self._spans = Spans()
        self._told: set[int] = set()  # digests and groups that the part explains
        self._good_bytes = 0
        self._rails_due_s = 0.0
        self._fault = ""
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None
        self._file = claim.take()
        self._write(block("start", **who))

    def note(self, reading: Reading) -> None:
        """Keep how rank 0's clock stands to this rank's."""
        fields = {"at_ns": reading.at_ns, "offset_ns": reading.offset_ns, "error_ns": reading.error_ns}
        self._write(block("reading", **fields))

    def begin(self, preview: Preview | None = None) -> None:
        """Record from now on.

        Args:
            preview: called with the part as far as it is, now and then; raises OSError where it cannot go on.

        Raises:
            StateError: this process records spans already.
        """
        self._spans = start_spans()
        self._context.keep_timeline(True)
        self._look_at_rails(time.monotonic())
        run = self._run if preview is None else partial(self._run_with, preview)
        self._thread = threading.Thread(target=run, name="multiring timeline", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Record no more; everything is in the part then."""
        stop_spans()
        self._context.keep_timeline(False)
        self._is_over.set()
        if self._thread is not None:
            self._thread.join()
        self._drain()
        self._look_at_rails(time.monotonic())

    def data(self) -> bytes:
        """Return the part, with its end; after `end`."""
        end = {"at_ns": time.monotonic_ns(), "dropped": self._context.dropped_from_timeline(), "fault": self._fault}
        self._write(block("end", **end))
        whole = self._so_far()
        return whole + block("end", **{**end, "fault": self._fault}) if self._fault else whole

    def _so_far(self) -> bytes:
        with self.path.open("rb") as file:
            return file.read(self._good_bytes)

    def close(self) -> None:
        """Leave the part where it is."""
        if self._file >= 0:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(self._file, fcntl.LOCK_UN)  # forks of this process hold the lock as well
            os.close(self._file)
            self._file = -1

    def remove(self) -> None:
        """Leave nothing of the part."""
        # While it is held: afterwards it may be another job's.
        if self._file >= 0:
            self.path.unlink(missing_ok=True)
        self.close()

    def _run(self) -> None:
        while not self._is_over.wait(_PERIOD_S):
            self._drain()

    def _run_with(self, preview: Preview) -> None:
        shown_bytes, next_s = -1, 0.0
        while not self._is_over.wait(_PREVIEW_PERIOD_S):
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

    def _drain(self) -> None:
        rows = self._context.take_timeline()
        spans = self._spans.take()
        if rows:
            words = self._words(rows)
            self._write((block("words", words) if words else b"") + block("rows", rows))
        if spans:
            self._write(block("spans", json.dumps(spans).encode()))
        now_s = time.monotonic()
        if now_s >= self._rails_due_s:
            self._look_at_rails(now_s)

    def _look_at_rails(self, now_s: float) -> None:
        self._rails_due_s = now_s + _PERIOD_S
        rails = [(peer, rail, carried) for peer, rail, _, carried, _ in self._context.rails()]
        if rails:
            self._write(block("rails", json.dumps(rails).encode(), at_ns=time.monotonic_ns()))

    def _words(self, rows: bytes) -> bytes:
        """Return what explains those numbers in `rows` that are new."""
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
        """Write whole blocks, or none any more once one could not be written."""
        if self._fault:
            return
        left = memoryview(data)
        try:
            while left:
                left = left[os.write(self._file, left) :]
        except OSError as error:
            self._fault = f"{self.path} cannot be written: {error.strerror}"
            self._context.keep_timeline(False)
            _log.warning("%s; what this rank does from now on is not in the timeline", self._fault)
            return
        self._good_bytes += len(data)
