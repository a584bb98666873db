"""DistributedOptimizer: an optimizer that steps with the combined gradients of all ranks."""
