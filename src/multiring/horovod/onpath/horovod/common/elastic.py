"""Training that continues from the last commit after a failure."""

from multiring._frontend.elastic.state import HostUpdateResult as HostUpdateResult
from multiring._frontend.elastic.state import ObjectState as ObjectState
from multiring._frontend.elastic.state import State as State
from multiring._frontend.elastic.state import run_fn as run_fn
