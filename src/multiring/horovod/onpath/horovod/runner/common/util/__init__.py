"""The parts of Horovod's launchers that scripts use."""
