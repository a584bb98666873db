"""Horovod's collectives on tensors."""
