"""Collectives and training steps, timed beside other libraries in one run."""
