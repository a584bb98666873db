"""The launcher process of `run_function`.

Usage: `python -m multiring._launch.function_launcher PARENT FILE`.

The launcher handles signals and forks. A separate process keeps both out of the calling program.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from multiring._launch.hosts import run_over_hosts
from multiring._launch.job import JobOptions
from multiring._launch.local import run_local
from multiring._launch.pickled_call import CallFolder
from multiring._launch.rank_starts import die_with
from multiring._settings import inherited_environment
from multiring.errors import LaunchError, MultiringError


def main(arguments: Sequence[str]) -> int:
    """Run the ranks and return the job's exit code.

    This process and the ranks are killed if the caller dies.
    """
    parent, file = arguments
    die_with(int(parent))
    folder = Path(file).parent
    told = json.loads(Path(file).read_text(encoding="utf-8"))
    command = [told["python"], "-m", "multiring._launch.function_rank"]
    environment = inherited_environment()
    options = JobOptions(
        log_dir=Path(told["log_dir"]) if told["log_dir"] else None,
        horovod=told["horovod"],
        grace_s=told["grace_s"],
        variables={name: environment[name] for name in told["variables"]},
        ssh_words=tuple(told["ssh_words"]),
    )
    call = CallFolder(folder)
    try:
        if told["hosts"] is not None:
            return run_over_hosts(command, told["hosts"], told["ranks"], options, call=call)
        return run_local([*command, str(folder)], told["ranks"], options)
    except MultiringError as error:
        call.refuse(error)
        return 2
    except Exception as error:
        call.refuse(
            LaunchError(f"the launcher has failed: {type(error).__name__}: {error}; its traceback is on stderr")
        )
        raise


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
