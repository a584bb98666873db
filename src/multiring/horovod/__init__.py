"""Run programs written for Horovod without changes.

Example: `multiring run --horovod -n 2 python their_script.py`.

The folder `onpath` contains a package `horovod` of thin modules. `--horovod` puts this folder on the path of the ranks
only. This package has the parts of Horovod's interface that multiring's adapters do not have.
"""

from multiring.horovod.running import run

__all__ = ["run"]
