"""A cache on the host's disk, between the training and the source. Blocks are verified at each read."""
