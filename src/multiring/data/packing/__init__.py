"""Packs: tar shards, with an index of all samples and a check sum of each block."""
