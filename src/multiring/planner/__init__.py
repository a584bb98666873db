"""Choose the cheapest schedule for a topology and a size."""

from multiring.planner.candidates import candidates as candidates
from multiring.planner.pins import Pins as Pins
from multiring.planner.pins import pins_of as pins_of
from multiring.planner.pins import pins_text
from multiring.planner.plan import Plan as Plan
from multiring.planner.plan import Task as Task
from multiring.planner.plan import cheapest as cheapest
from multiring.planner.plan import engine_of as engine_of
from multiring.planner.plan import ranked as ranked
from multiring.planner.plan import refuse_unfit as refuse_unfit
from multiring.planner.plan import repriced as repriced
from multiring.planner.ways import ways_of as ways_of

__all__ = ["pins_text"]  # what docs/plan.md offers; the rest is for other packages of multiring
