"""The version of Horovod whose interface this is; `multiring.__version__` is that of what does the work."""

__version__ = "0.28.1"
