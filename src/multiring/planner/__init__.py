"""Choose the cheapest schedule for a topology and a size."""

from multiring.planner.candidates import candidates
from multiring.planner.device_routes import (
    LEAST_NCCL_BYTES,
    DevicePlan,
    DeviceRoute,
    auto_path,
    auto_route,
    chosen_route,
    device_plans,
    problem_of_route,
)
from multiring.planner.pins import Pins, pins_of, pins_text
from multiring.planner.plan import Plan, Task, cheapest, count_of_plans, engine_of, ranked, refuse_unfit, repriced
from multiring.planner.ways import ways_of

__all__ = ["pins_text"]  # what docs/plan.md offers; the rest is for other packages of multiring
