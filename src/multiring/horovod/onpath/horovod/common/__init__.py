"""What Horovod's adapters share."""
