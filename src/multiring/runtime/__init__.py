"""Ranks at work: who they are, how they meet, the groups they form and the operations in flight."""

from multiring.runtime.edge import local_rank as local_rank
from multiring.runtime.edge import local_size as local_size
from multiring.runtime.edge import rank as rank
from multiring.runtime.edge import size as size
from multiring.runtime.edge import start_timeline as start_timeline
from multiring.runtime.edge import stop_timeline as stop_timeline
from multiring.runtime.edge import take_events as take_events
from multiring.runtime.edge import world as world
from multiring.runtime.events import Event as Event
from multiring.runtime.group import Group as Group
from multiring.runtime.handles import Handle as Handle
from multiring.runtime.wires import round_trip as round_trip
from multiring.runtime.world import init as init
from multiring.runtime.world import is_initialized as is_initialized
from multiring.runtime.world import shutdown as shutdown
