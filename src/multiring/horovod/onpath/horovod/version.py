"""The version of Horovod whose interface this is; `multiring.__version__` is that of what does the work."""

from multiring.horovod import versions

__version__ = versions.HOROVOD_VERSION
