"""Set a rank's HOROVOD_* variables, then execute a command.

Usage: `python -m multiring._launch.horovod_exec HOSTS CMD...`.

`multiring run --hosts --horovod` makes mpiexec start this module, because mpiexec gives all ranks the same environment
and HOROVOD_RANK differs by rank.
"""

import os
import sys
from collections.abc import Mapping, Sequence

from multiring._launch.horovod import HorovodPosition, horovod_environment, positions_on, without_position
from multiring._launch.mpiexec import parse_hosts
from multiring._settings import foreign_environment, inherited_environment
from multiring.errors import LaunchError

# The variables in which mpiexec passes the rank. The first one that is set counts.
_RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")


def position_of(hosts: str, foreign: Mapping[str, str]) -> HorovodPosition:
    """Return the position of the rank that mpiexec's variables name.

    Raises:
        LaunchError: the variables name no rank, or a rank beyond the places of `hosts`.
    """
    text = next((foreign[name] for name in _RANKS if name in foreign), None)
    places = positions_on(parse_hosts(hosts))
    if text is None or not text.isdecimal() or int(text) >= len(places):
        raise LaunchError(f"mpiexec gives rank {text} in {' or '.join(_RANKS)}: want 0 to {len(places) - 1}")
    return places[int(text)]


def main(arguments: Sequence[str]) -> None:
    """Replace this process by the command in `arguments`, which follows the hosts."""
    hosts, *command = arguments
    environment = without_position(inherited_environment())
    told = horovod_environment(environment, position_of(hosts, foreign_environment()))
    try:
        os.execvpe(command[0], command, environment | told)  # noqa: S606 -- the user asked for this command
    except OSError as error:
        sys.stderr.write(f"multiring: cannot execute {command[0]!r}: {error.strerror}\n")
        raise SystemExit(127 if isinstance(error, FileNotFoundError) else 126) from None


if __name__ == "__main__":
    main(sys.argv[1:])
