"""multiring, for programs that were written for Horovod (docs/horovod.md)."""

from horovod.version import __version__ as __version__
from multiring.horovod import run as run
