"""Counters of a training's steps, and a rank's report on them to its launcher."""
