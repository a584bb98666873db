"""DistributedOptimizer: an optimizer whose gradients are those of all ranks."""
