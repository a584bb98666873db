"""Run a job that survives its launcher: `multiring run --survive-launcher S`, and the program of the job's keeper.

Usage of the program, which only `multiring run` starts: LISTENER LINK SECONDS WORDS..., where the first two are numbers
of open sockets, and WORDS are the command behind `multiring`.
"""

import socket
import sys
from collections.abc import Sequence
from typing import NoReturn

from multiring._cli import main as multiring
from multiring._launch.job_keeper import JobKeeper
from multiring._launch.keeper_address import command_told
from multiring._launch.kept_launcher import run_kept
from multiring.errors import ArgumentError

_LONGEST_S = 86_400.0


def run_surviving(words: Sequence[str], survive_s: float) -> NoReturn:
    """Run or adopt the job of a command that may lose its launcher for `survive_s` seconds; end with its exit code.

    Raises:
        ArgumentError: the time is not between 1 s and a day.
        LaunchError: as `run_kept`.
    """
    if not 1 <= survive_s <= _LONGEST_S:  # the comparison also rejects NaN
        raise ArgumentError(f"--survive-launcher {survive_s:g}: want seconds, 1 to {_LONGEST_S:.0f}, a day")
    run_kept(words, survive_s, __name__)


def keep(arguments: Sequence[str]) -> None:
    """Be the keeper of a job."""
    listener, link = (socket.socket(fileno=int(each)) for each in arguments[:2])
    words = arguments[3:]
    keeper = JobKeeper(listener, link, float(arguments[2]), command_told(words))
    keeper.run(lambda: multiring(words, is_kept=True))


if __name__ == "__main__":
    keep(sys.argv[1:])
