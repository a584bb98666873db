"""Check the command of the ranks, and build the ranks' environment."""

import os
import shutil
import sys
import threading
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path

from multiring._launch.cores import thread_variables
from multiring._launch.horovod import CARRIERS, without_position
from multiring._launch.torchrun_variables import without_torchrun_nodes
from multiring._settings import HOROVOD_PLACE, TORCH_PLACE, environment_of, places_told
from multiring.errors import ArgumentError, LaunchError, StateError, UnsupportedError


class CommandError(LaunchError):
    """The command cannot be run.

    `exit_code` is a shell's exit code: 127 not found, 126 not executable.
    """

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code

    def __reduce__(self) -> tuple[type["CommandError"], tuple[str, int]]:
        return type(self), (str(self), self.exit_code)


_OURS = ("rank", "size", "local_rank", "local_size", "rank_process", "launched_in", "reports")
_OF_ONE_HOST = ("rendezvous", "secret", "secret_file", "job")  # on several hosts the user may set these variables


def refuse_places(variables: Mapping[str, str], *, horovod: bool, timeline: bool, one_host: bool = True) -> None:
    """Raise ArgumentError if --env sets a variable that the launcher sets itself.

    Args:
        variables: values by name, from --env.
        horovod: whether `import horovod` means multiring in the ranks.
        timeline: whether an option already names the timeline file.
        one_host: whether this launcher starts the ranks itself. On several hosts mpiexec starts them.
    """
    ours = environment_of(**dict.fromkeys((*_OURS, *(_OF_ONE_HOST if one_host else ())), ""))
    given = {*ours, *(name for key, name in TORCH_PLACE.items() if key not in ("address", "port") or not one_host)}
    if horovod:
        given |= {*HOROVOD_PLACE.values(), *CARRIERS}
    found = sorted(given & set(variables))
    if found:
        # A value may be a secret, which must not be in a terminal's log: the variable's name says enough.
        raise ArgumentError(f"--env {found[0]}: the launcher gives each rank its own {found[0]}; leave it out")
    (name,) = environment_of(timeline="")
    if timeline and name in variables:
        raise ArgumentError(f"--env {name}={variables[name]!r}: --timeline already names the file; leave one out")


def check_can_run(what: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Raise unless `command` can be started from here with `environment`.

    Raises:
        ArgumentError: `command` is empty.
        CommandError: the program does not exist or cannot be executed.
        UnsupportedError: the system is not Linux.
        StateError: the caller is not the main thread.
    """
    if not sys.platform.startswith("linux"):
        raise UnsupportedError(f"{what} works only on Linux; this is {sys.platform}")
    if threading.current_thread() is not threading.main_thread():
        raise StateError(f"{what} must be called from the main thread: it handles signals")
    if not command:
        raise ArgumentError("no command to run: want a program for the ranks, as in `multiring run -n 2 script.py`")
    check_command(command[0], environment)


def check_command(program: str, environment: Mapping[str, str]) -> None:
    """Raise CommandError unless a shell would find and execute `program`.

    The shell has the variables `environment`.
    """
    path = environment.get("PATH", os.defpath)
    if shutil.which(program, path=path) is not None:
        return
    if shutil.which(program, mode=os.F_OK, path=path) is None and not Path(program).is_dir():
        if program.endswith(".py"):
            raise CommandError(f"no such script: {program!r} in {Path.cwd()}{_like_it(program)}", 127)
        where = "" if "/" in program else f" on PATH ({path})"
        raise CommandError(f"command not found: {program!r}{where}", 127)
    raise CommandError(f"cannot execute {program!r}: it is a directory, or not executable by this user", 126)


def _like_it(script: str) -> str:
    """Return a hint that names the script of the same folder with the most similar name, or an empty text."""
    folder = Path(script).parent
    there = [each.name for each in folder.glob("*.py")] if folder.is_dir() else []
    meant = get_close_matches(Path(script).name, there, n=1, cutoff=0.8)
    return f"; did you mean {str(folder / meant[0])!r}?" if meant else ""


def environment_of_process(environment: Mapping[str, str], threads: int, **settings: object) -> dict[str, str]:
    """Return `environment` plus the variables for `threads` and `settings`.

    `settings` are given by field name.
    """
    kept = without_torchrun_nodes(without_position(environment))
    made = {"PYTHONUNBUFFERED": "1", **kept, **thread_variables(environment, threads)}
    for name in environment_of(secret_file="", rank_process="", reports="", min_ranks="", intake=""):
        made.pop(name, None)  # they belong to an outer job; this job passes its own secret in MULTIRING_SECRET
    return made | environment_of(launched_in=places_told(environment), **settings)
