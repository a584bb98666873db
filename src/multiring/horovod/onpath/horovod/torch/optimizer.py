"""An optimizer whose gradients are those of all ranks."""

from multiring.torch.optimizer.lenient import DistributedOptimizer as DistributedOptimizer
