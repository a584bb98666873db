"""Packs: tar shards beside a manifest that says where every sample is, and what every block's bytes are."""
