"""Programs written for Horovod, unmodified: `multiring run --horovod -n 2 python their_script.py`.

The folder `onpath` holds a package `horovod` of thin modules; `--horovod` puts it on the ranks' path, and on nobody
else's. What that package has besides `multiring.torch` is here.
"""

from multiring.horovod.running import run as run

__all__ = ["run"]
