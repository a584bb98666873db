"""`python -m multiring.horovod SCRIPT [ARGUMENTS...]`: run a Horovod program.

In the program, `import horovod` imports multiring.

Use it for ranks that mpiexec, srun, jsrun or torchrun starts; `multiring run --horovod` does the same for its own
ranks. The arguments are those of `python`, so `-m MODULE` and `-c TEXT` work too.
"""

import os
import sys
from collections.abc import Sequence

from multiring._launch.horovod import path_with_horovod
from multiring._settings import inherited_environment

_USAGE = "usage: python -m multiring.horovod [-m MODULE | SCRIPT] [ARGUMENTS...]"


def main(arguments: Sequence[str]) -> None:
    """Replace this process by the program.

    The program finds multiring's `horovod` package on its path.

    Raises:
        SystemExit: `arguments` names no program, or asks for help.
    """
    if not arguments or arguments[0] in ("-h", "--help"):
        raise SystemExit(_USAGE)
    environment = inherited_environment()
    told = {"PYTHONPATH": path_with_horovod(environment)}
    os.execve(sys.executable, [sys.executable, *arguments], environment | told)  # noqa: S606 -- the user's program


if __name__ == "__main__":
    main(sys.argv[1:])
