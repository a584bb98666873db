"""One call that makes a training script for one process one for any number of ranks."""

from multiring.torch.distributing.loader import DistributedLoader as DistributedLoader
from multiring.torch.distributing.preparing import distribute as distribute
