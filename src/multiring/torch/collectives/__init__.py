"""Horovod's collectives on torch tensors."""
