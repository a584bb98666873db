"""Measure the planner's constants by running collectives over the links of the job."""

from multiring._probe.measure import Findings as Findings
from multiring._probe.measure import probe as probe
from multiring._probe.other_work import OtherWork as OtherWork
from multiring._probe.timing import time_plan as time_plan
from multiring._probe.timing import time_plans as time_plans
