"""Blocks from host to host, so that each leaves its source once."""
