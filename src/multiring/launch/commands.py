"""The command that every rank runs: whether it can be started, and the environment that it gets."""

import os
import shutil
import sys
import threading
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path

from multiring.errors import ArgumentError, LaunchError, StateError, UnsupportedError
from multiring.launch.cores import thread_variables
from multiring.launch.horovod import CARRIERS, without_position
from multiring.settings import HOROVOD_PLACE, TORCH_PLACE, environment_of, places_told


class CommandError(LaunchError):
    """The command cannot be run; `exit_code` is what a shell would return: 127 not found, 126 not executable."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code

    def __reduce__(self) -> tuple[type["CommandError"], tuple[str, int]]:
        return type(self), (str(self), self.exit_code)


_OURS = ("rank", "size", "local_rank", "local_size", "rank_process", "launched_in")
_OF_ONE_HOST = ("rendezvous", "secret", "secret_file", "job")  # a job of several hosts takes the user's


def refuse_places(variables: Mapping[str, str], *, horovod: bool, timeline: bool, one_host: bool = True) -> None:
    """Raise ArgumentError where `variables`, of --env, have one that the launcher itself gives each rank.

    Args:
        variables: by name.
        horovod: whether ranks take multiring for Horovod.
        timeline: whether an option names the timeline.
        one_host: whether this launcher starts the ranks itself.
    """
    ours = environment_of(**dict.fromkeys((*_OURS, *(_OF_ONE_HOST if one_host else ())), ""))
    given = {*ours, *(name for key, name in TORCH_PLACE.items() if key not in ("address", "port") or not one_host)}
    if horovod:
        given |= {*HOROVOD_PLACE.values(), *CARRIERS}
    found = sorted(given & set(variables))
    if found:
        raise ArgumentError(
            f"--env {found[0]}={variables[found[0]]!r}: the launcher gives each rank its own {found[0]}; leave it out"
        )
    (name,) = environment_of(timeline="")
    if timeline and name in variables:
        raise ArgumentError(f"--env {name}={variables[name]!r}: --timeline says where it is written; leave one out")


def check_can_run(what: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Raise unless `command` can be started from here with `environment`.

    Raises:
        ArgumentError: there is no command.
        CommandError: it does not exist or cannot be executed.
        UnsupportedError: this is not Linux.
        StateError: not called from the main thread.
    """
    if not sys.platform.startswith("linux"):
        raise UnsupportedError(f"{what} works on Linux only, this is {sys.platform}")
    if threading.current_thread() is not threading.main_thread():
        raise StateError(f"{what} must be called from the main thread: it handles signals")
    if not command:
        raise ArgumentError("no command to run: want what every rank runs, as in `multiring run -n 2 script.py`")
    check_command(command[0], environment)


def check_command(program: str, environment: Mapping[str, str]) -> None:
    """Raise CommandError unless a shell with `environment` would find and execute `program`."""
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
    """Return the script in the same folder that was meant, if it can be told."""
    folder = Path(script).parent
    there = [each.name for each in folder.glob("*.py")] if folder.is_dir() else []
    meant = get_close_matches(Path(script).name, there, n=1, cutoff=0.8)
    return f"; did you mean {str(folder / meant[0])!r}?" if meant else ""


def environment_of_process(environment: Mapping[str, str], threads: int, **settings: object) -> dict[str, str]:
    """Return `environment` for a process that computes with `threads` and reads `settings`, given by field name."""
    made = {"PYTHONUNBUFFERED": "1", **without_position(environment), **thread_variables(environment, threads)}
    for name in environment_of(secret_file="", rank_process=""):
        made.pop(name, None)  # an outer job's; this one's secret is given in full
    return made | environment_of(launched_in=places_told(environment), **settings)
