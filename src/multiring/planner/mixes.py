"""The former name of `multiring.planner.parallelism`."""

from multiring._former_names import refuse_module

refuse_module(__name__)
