"""Reports on time: the share of the peak, the bottleneck, and the timeline."""
