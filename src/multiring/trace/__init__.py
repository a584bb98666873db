"""Timelines: record when every rank did what, and write one file that Perfetto and chrome://tracing open."""

from multiring.trace.claims import Claim as Claim
from multiring.trace.claims import TakenError as TakenError
from multiring.trace.claims import is_held as is_held
from multiring.trace.clocks import Alignment as Alignment
from multiring.trace.clocks import ClockReading as ClockReading
from multiring.trace.clocks import best_reading as best_reading
from multiring.trace.file import TraceFile as TraceFile
from multiring.trace.file import clear as clear
from multiring.trace.file import file_path as file_path
from multiring.trace.file import merge as merge
from multiring.trace.file import part_path as part_path
from multiring.trace.file import parts_of as parts_of
from multiring.trace.file import unfinished_of as unfinished_of
from multiring.trace.glossary import Glossary as Glossary
from multiring.trace.part import Part as Part
from multiring.trace.part import block as block
from multiring.trace.part import read_part as read_part
from multiring.trace.spans import Follower as Follower
from multiring.trace.spans import Spans as Spans
from multiring.trace.spans import follow as follow
from multiring.trace.spans import recorded as recorded
from multiring.trace.spans import span
from multiring.trace.spans import start_spans as start_spans
from multiring.trace.spans import stop_spans as stop_spans

__all__ = ["span"]  # what docs/timeline.md offers; the rest is for other packages of multiring
