"""Find the bottleneck of a training: its data, its computation or its network."""
