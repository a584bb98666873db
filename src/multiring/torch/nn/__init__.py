"""Layers that communicate with all ranks."""
