"""Detection of ranks that do not arrive.

The modules ask for the ranks' status, find circles of waiting ranks, and log warnings or raise errors.
"""
