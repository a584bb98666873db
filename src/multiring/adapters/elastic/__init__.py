"""Elastic training for an adapter: the states that it derives its own from, and `run`."""

from multiring._frontend.elastic.own import OwnValue, Randomness, RankChange
from multiring._frontend.elastic.running import run
from multiring._frontend.elastic.speed_shares import SpeedShares
from multiring._frontend.elastic.state import ObjectState, State
from multiring._frontend.elastic.values_state import ValuesState

__all__ = ["ObjectState", "OwnValue", "Randomness", "RankChange", "SpeedShares", "State", "ValuesState", "run"]
