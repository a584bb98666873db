"""Stages that run before and after the optimizer's own step, in a fixed order; see `stages.py`."""
