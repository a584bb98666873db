"""Reports on time: the share of the machine's peak, the bottleneck, and steps in the timeline."""
