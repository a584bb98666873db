"""Code that the adapters of all frameworks share, with Horovod's names. It imports no framework."""
