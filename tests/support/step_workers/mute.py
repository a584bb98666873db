"""A worker that writes no answer."""
