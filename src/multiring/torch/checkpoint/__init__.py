"""Checkpoints of torch's models and optimizers."""
