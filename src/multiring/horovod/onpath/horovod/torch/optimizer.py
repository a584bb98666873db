"""An optimizer whose gradients are those of all ranks."""

from multiring.torch import DistributedOptimizer as DistributedOptimizer
