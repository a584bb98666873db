"""The common parts of Horovod's adapters."""
