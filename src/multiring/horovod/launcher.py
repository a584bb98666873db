"""`python -m multiring.horovod.launcher PARENT RANKS FOLDER LOGS PYTHON`: the process that runs `horovod.run`'s ranks.

It is one of its own because a launcher handles signals and forks, which the calling program may not like.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from multiring.launch import JobOptions, die_with, run_local


def main(arguments: Sequence[str]) -> int:
    """Run the ranks and return the job's exit code; should the caller die, this process and the ranks do too."""
    parent, ranks, folder, logs, python = arguments
    die_with(int(parent))
    command = [python, "-m", "multiring.horovod.function", folder]
    return run_local(command, int(ranks), JobOptions(log_dir=Path(logs) if logs else None, horovod=True))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
