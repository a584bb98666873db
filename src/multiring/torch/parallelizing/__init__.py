"""Run one model on many ranks: measure its step under each parallelism, choose one, and build it.

`planner.parallelism` makes the choice. This package analyses and measures the model, and puts it on a DeviceMesh with
torch's own means.
"""
