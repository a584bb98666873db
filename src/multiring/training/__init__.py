"""A training loop for PyTorch, with options, evaluation, checkpoints and a report."""
