"""Batch normalization over the samples of all ranks."""

from multiring.tensorflow.sync_batch_norm import SyncBatchNormalization
