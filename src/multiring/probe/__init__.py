"""Measuring what the planner reckons with, by running collectives in the job whose links are meant."""

from multiring.probe.measure import Findings as Findings
from multiring.probe.measure import probe as probe
from multiring.probe.other_work import OtherWork as OtherWork
from multiring.probe.timing import time_plan as time_plan
from multiring.probe.timing import time_plans as time_plans
