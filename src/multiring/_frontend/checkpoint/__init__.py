"""Checkpoints: the state of a training on disk, from which any number of ranks can resume."""
