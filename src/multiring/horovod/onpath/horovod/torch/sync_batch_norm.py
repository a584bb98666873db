"""Batch normalization over the samples of all ranks."""

from multiring.torch import SyncBatchNorm
