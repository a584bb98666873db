"""Measure the planner's constants by running collectives over the links of the job."""

from multiring._probe.devices import with_devices
from multiring._probe.measure import Findings, probe
from multiring._probe.other_work import OtherWork
from multiring._probe.timing import time_plan, time_plans
