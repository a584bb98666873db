"""Gradient buckets: all ranks reduce them during backward, exactly or with lossy compression."""
