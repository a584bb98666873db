"""A worker that breaks."""

raise RuntimeError("I break")
