"""A worker that leaves no answer."""
