"""The runtime of a rank: start-up, rendezvous, groups and their operations."""

from multiring._runtime.api import drain_events as drain_events
from multiring._runtime.api import event_reader as event_reader
from multiring._runtime.api import local_rank as local_rank
from multiring._runtime.api import local_size as local_size
from multiring._runtime.api import rank as rank
from multiring._runtime.api import size as size
from multiring._runtime.api import start_timeline as start_timeline
from multiring._runtime.api import stop_timeline as stop_timeline
from multiring._runtime.api import world as world
from multiring._runtime.events import Event as Event
from multiring._runtime.group.group import Group as Group
from multiring._runtime.group.handles import Handle as Handle
from multiring._runtime.group.wires import quantize_dequantize as quantize_dequantize
from multiring._runtime.job.job import init as init
from multiring._runtime.job.job import is_initialized as is_initialized
from multiring._runtime.job.job import shutdown as shutdown
