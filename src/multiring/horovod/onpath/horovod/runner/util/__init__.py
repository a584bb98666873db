"""What Horovod's launcher is made of, as far as scripts use it."""
