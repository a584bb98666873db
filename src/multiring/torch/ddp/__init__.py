"""What DistributedDataParallel gets: a communication hook, and tensors side by side in the arena."""
