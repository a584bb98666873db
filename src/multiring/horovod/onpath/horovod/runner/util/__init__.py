"""The parts of Horovod's launcher that scripts use."""
