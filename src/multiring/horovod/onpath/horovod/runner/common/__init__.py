"""The common parts of Horovod's launchers."""
