"""Measure a model under each parallelism, choose one, and build it on all ranks.

`planner.parallelism` makes the choice. This package analyses and measures the model, and puts it on a DeviceMesh with
torch's own means.
"""
