"""Forecast the memory and time of a training step under data, sharded, tensor and pipeline parallelism."""

from multiring.planner.parallelism.axes import Axis, Parallelism, parallelism_of, parallelisms_of
from multiring.planner.parallelism.feeding import Feeding, InputTime, input_time
from multiring.planner.parallelism.forecast import Forecast, chosen, forecast, forecasts, table
from multiring.planner.parallelism.memory import Memory, memory_of
from multiring.planner.parallelism.parts import gathered_together, stages_of
from multiring.planner.parallelism.pipeline import StageTime, makespan
from multiring.planner.parallelism.prices import Prices
from multiring.planner.parallelism.profile import Compute, GradientExchange, Overheads, Profile, Unit
from multiring.planner.parallelism.seconds import (
    BucketTime,
    LinkSeconds,
    Seconds,
    bucket_times,
    buckets_of,
    link_seconds,
    seconds_of,
)
