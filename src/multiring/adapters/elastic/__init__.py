"""Elastic training for an adapter: the states that it derives its own from, and `run`."""

from multiring._frontend.elastic.running import run as run
from multiring._frontend.elastic.state import ObjectState as ObjectState
from multiring._frontend.elastic.state import State as State
from multiring._frontend.elastic.values_state import ValuesState as ValuesState

__all__ = ["ObjectState", "State", "ValuesState", "run"]
