"""What happens around the optimizer's own step, each a stage with its place in one order; see `stages.py`."""
