"""What the adapters of all frameworks share, in Horovod's words; imports no framework."""
