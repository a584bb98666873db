"""Measure the planner's constants by running collectives over the links of the job."""

from multiring.probe.measure import Findings as Findings
from multiring.probe.measure import probe as probe
from multiring.probe.other_work import OtherWork as OtherWork
from multiring.probe.timing import time_plan as time_plan
from multiring.probe.timing import time_plans as time_plans
