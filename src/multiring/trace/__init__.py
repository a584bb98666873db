"""Timelines: record when every rank did what, and write one file that Perfetto and chrome://tracing open."""

from multiring.trace.claims import Claim, TakenError, is_held
from multiring.trace.clocks import Alignment, ClockReading, best_reading
from multiring.trace.file import TraceFile, clear, file_path, merge, part_path, parts_of, unfinished_of
from multiring.trace.glossary import Glossary
from multiring.trace.part import Part, block, read_part
from multiring.trace.reading import TimelineFile, read_timeline_file
from multiring.trace.spans import DeviceSlice, Follower, Spans, follow, recorded, span, start_spans, stop_spans

__all__ = ["span"]  # what docs/timeline.md offers; the rest is for other packages of multiring
