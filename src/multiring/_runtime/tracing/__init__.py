"""Timelines: each rank's recording, the ranks' clocks, and the merged file."""
