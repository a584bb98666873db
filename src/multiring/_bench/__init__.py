"""Time collectives and training steps of multiring and other libraries in one run."""
