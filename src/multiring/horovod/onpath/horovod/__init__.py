"""multiring under Horovod's name (docs/horovod.md)."""

from horovod.version import __version__
from multiring.horovod import run
