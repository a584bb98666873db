"""One model on many ranks: what its step takes under each mix of axes, and the mix that is built.

`planner.parallelism` decides; here a model is taken apart, measured, and put on a DeviceMesh by torch's own means.
"""
