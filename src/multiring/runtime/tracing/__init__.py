"""Timelines: the recording of each rank, the ranks' clocks, and the file made of all recordings."""
