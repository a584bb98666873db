"""Mixes of data, sharded, tensor and pipeline parallelism: what there are, and what each takes of memory and time."""

from multiring.planner.mixes.forecast import Forecast as Forecast
from multiring.planner.mixes.forecast import chosen as chosen
from multiring.planner.mixes.forecast import forecast as forecast
from multiring.planner.mixes.forecast import forecasts as forecasts
from multiring.planner.mixes.forecast import table as table
from multiring.planner.mixes.memory import Memory as Memory
from multiring.planner.mixes.memory import memory_of as memory_of
from multiring.planner.mixes.mix import Axis as Axis
from multiring.planner.mixes.mix import Mix as Mix
from multiring.planner.mixes.mix import mix_of as mix_of
from multiring.planner.mixes.mix import mixes_of as mixes_of
from multiring.planner.mixes.parts import gathered_together as gathered_together
from multiring.planner.mixes.parts import stages_of as stages_of
from multiring.planner.mixes.pipeline import Stage as Stage
from multiring.planner.mixes.pipeline import makespan as makespan
from multiring.planner.mixes.profile import Compute as Compute
from multiring.planner.mixes.profile import Overheads as Overheads
from multiring.planner.mixes.profile import Profile as Profile
from multiring.planner.mixes.profile import Unit as Unit
from multiring.planner.mixes.seconds import Seconds as Seconds
from multiring.planner.mixes.seconds import seconds_of as seconds_of
