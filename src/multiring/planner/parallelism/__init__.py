"""Forecast the memory and time of a training step under data, sharded, tensor and pipeline parallelism."""

from multiring.planner.parallelism.axes import Axis as Axis
from multiring.planner.parallelism.axes import Parallelism as Parallelism
from multiring.planner.parallelism.axes import parallelism_of as parallelism_of
from multiring.planner.parallelism.axes import parallelisms_of as parallelisms_of
from multiring.planner.parallelism.forecast import Forecast as Forecast
from multiring.planner.parallelism.forecast import chosen as chosen
from multiring.planner.parallelism.forecast import forecast as forecast
from multiring.planner.parallelism.forecast import forecasts as forecasts
from multiring.planner.parallelism.forecast import table as table
from multiring.planner.parallelism.memory import Memory as Memory
from multiring.planner.parallelism.memory import memory_of as memory_of
from multiring.planner.parallelism.parts import gathered_together as gathered_together
from multiring.planner.parallelism.parts import stages_of as stages_of
from multiring.planner.parallelism.pipeline import StageTime as StageTime
from multiring.planner.parallelism.pipeline import makespan as makespan
from multiring.planner.parallelism.profile import Compute as Compute
from multiring.planner.parallelism.profile import Overheads as Overheads
from multiring.planner.parallelism.profile import Profile as Profile
from multiring.planner.parallelism.profile import Unit as Unit
from multiring.planner.parallelism.seconds import Seconds as Seconds
from multiring.planner.parallelism.seconds import seconds_of as seconds_of
