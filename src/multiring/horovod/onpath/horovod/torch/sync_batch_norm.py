"""Batch norm over all ranks' batches."""

from multiring.torch import SyncBatchNorm as SyncBatchNorm
