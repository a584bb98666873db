"""`python -m multiring.horovod SCRIPT [ARGUMENTS...]`: run a program that imports horovod, which means multiring.

For ranks that mpiexec, srun, jsrun or torchrun start: what `multiring run --horovod` does for those it starts itself.
What follows is what follows `python`: also `-m MODULE`, or `-c TEXT`.
"""

import os
import sys
from collections.abc import Sequence

from multiring.launch.horovod import path_with_horovod
from multiring.settings import inherited_environment

_USAGE = "usage: python -m multiring.horovod [-m MODULE | SCRIPT] [ARGUMENTS...]"


def main(arguments: Sequence[str]) -> None:
    """Replace this process by the program, which finds horovod on its path.

    Raises:
        SystemExit: no program is named.
    """
    if not arguments or arguments[0] in ("-h", "--help"):
        raise SystemExit(_USAGE)
    environment = inherited_environment()
    told = {"PYTHONPATH": path_with_horovod(environment)}
    os.execve(sys.executable, [sys.executable, *arguments], environment | told)  # noqa: S606 -- the user's program


if __name__ == "__main__":
    main(sys.argv[1:])
