"""Run a training script that was written for one process on any number of ranks."""

from multiring.torch.distributing.loader import DistributedLoader as DistributedLoader
from multiring.torch.distributing.preparing import distribute as distribute
