"""The runtime of a rank: start-up, rendezvous, groups and their operations."""

from multiring._runtime.api import (
    drain_events,
    event_reader,
    local_rank,
    local_size,
    rank,
    size,
    start_timeline,
    stop_timeline,
    world,
)
from multiring._runtime.events import Event
from multiring._runtime.group.group import Group
from multiring._runtime.group.handles import Handle
from multiring._runtime.group.wires import quantize_dequantize
from multiring._runtime.job.job import init, is_initialized, shutdown
