"""The runtime of a rank: start-up, rendezvous, groups and their operations."""

from typing import TYPE_CHECKING

from multiring._first_use import import_on_first_use

if TYPE_CHECKING:
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

import_on_first_use(
    __name__,
    {
        "multiring._runtime.api": [
            "drain_events",
            "event_reader",
            "local_rank",
            "local_size",
            "rank",
            "size",
            "start_timeline",
            "stop_timeline",
            "world",
        ],
        "multiring._runtime.events": ["Event"],
        "multiring._runtime.group.group": ["Group"],
        "multiring._runtime.group.handles": ["Handle"],
        "multiring._runtime.group.wires": ["quantize_dequantize"],
        "multiring._runtime.job.job": ["init", "is_initialized", "shutdown"],
    },
)
