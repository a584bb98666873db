"""Topology and size in, the cheapest schedule out."""

from multiring.planner.plan import Plan as Plan
from multiring.planner.plan import candidates as candidates
from multiring.planner.plan import choose as choose
