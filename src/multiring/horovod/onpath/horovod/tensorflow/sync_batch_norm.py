"""Batch normalization by all ranks' samples."""

from multiring.tensorflow.sync_batch_norm import SyncBatchNormalization as SyncBatchNormalization
