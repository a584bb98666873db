"""Gradients in buckets: reduced by all ranks together, while more of them are made, also in a lossy form."""
