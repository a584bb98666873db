"""Gradient buckets, which all ranks reduce during backward, exactly or lossily."""
