"""Checkpoints: what a training script keeps on disk of itself, to go on from on any number of ranks."""
