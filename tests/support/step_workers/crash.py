"""A worker that raises an error."""

raise RuntimeError("I break")
