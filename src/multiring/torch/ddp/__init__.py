"""Support for DistributedDataParallel: a communication hook, and adjacent tensors in the arena."""
