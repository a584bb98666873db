"""Training that continues from the last commit after a failure."""

from multiring._frontend.elastic.state import HostUpdateResult, ObjectState, State, run_fn
