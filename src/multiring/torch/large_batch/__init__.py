"""Optimizers and parts of a step for large batches and 16 bits."""
