"""The version of Horovod's interface.

`multiring.__version__` is the version of multiring.
"""

from multiring.horovod import versions

__version__ = versions.HOROVOD_VERSION
