"""Layers that look at the samples of all ranks."""
