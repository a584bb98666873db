"""What Horovod's launchers are made of, as far as scripts use it."""
