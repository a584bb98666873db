"""Unpack and build a commit of this repository, with a Python that imports it."""

import io
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from multiring._settings import inherited_environment

ROOT = Path(__file__).parents[3]
_BUILT = "built"
_TARGETS = ("_core", "_tensorflow", "_jax")  # the targets of `make build`


class TreeError(RuntimeError):
    """Raised if the commit does not exist or cannot be built.

    The text holds the output of the failed command.
    """


@dataclass(frozen=True, slots=True)
class Tree:
    """A commit and the folder of its build."""

    commit: str
    folder: Path

    @property
    def source(self) -> Path:
        """The folder with the commit's files."""
        return self.folder / "source"

    @property
    def python(self) -> Path:
        """The Python whose `import multiring` imports this commit."""
        return self.folder / "env" / "bin" / "python"


def git(*words: str) -> bytes:
    """Return git's output for this repository.

    Raises:
        TreeError: git failed.
    """
    return _run(("git", "-C", str(ROOT), *words), "git")


def commit_of(name: str) -> str:
    """Return the full hash of a commit.

    Raises:
        TreeError: The commit does not exist.
    """
    try:
        return git("rev-parse", "--verify", "--quiet", f"{name}^{{commit}}").decode().strip()
    except TreeError:
        raise TreeError(f"{name!r} is no commit of {ROOT}") from None


def has_changes() -> bool:
    """Return whether tracked files differ from the commit that is checked out."""
    return bool(git("status", "--porcelain", "--untracked-files=no").strip())


def built(commit: str, cache: Path) -> Tree:
    """Return the commit, built as by `make build`.

    It is unpacked into `cache`, unless an earlier build is there. The caller's checkout is only read. Both commits are
    built with the same compiler and tools, and use the packages of this Python's environment.

    Raises:
        TreeError: The commit cannot be built.
    """
    tree = Tree(commit, cache / commit[:12])
    built_by = "\n".join((sys.version, sys.prefix, *_TARGETS, *(_said_by(each) for each in ("c++", "cmake", "ninja"))))
    stamp = tree.folder / _BUILT
    if stamp.exists() and stamp.read_text(encoding="utf-8") == built_by:
        make_environment(tree)  # an earlier checkout may have made it in another way
        return tree
    print(f"building {commit[:12]} in {tree.folder}", file=sys.stderr, flush=True)
    if tree.folder.exists():
        shutil.rmtree(tree.folder)
    tree.source.mkdir(parents=True)
    with tarfile.open(fileobj=io.BytesIO(git("archive", "--format=tar", commit))) as files:
        files.extractall(tree.source, filter="data")
    flags = {
        "CMAKE_MAKE_PROGRAM": _tool("ninja"),
        "Python_EXECUTABLE": sys.executable,
        "MULTIRING_STRICT": "OFF",  # warnings of a newer compiler do not matter for the speed
        "MULTIRING_TESTS": "OFF",
    }
    words = [f"-D{name}={value}" for name, value in flags.items()]
    # The commit's own preset "dev", which `make build` uses. Its relative paths refer to the commit's own folder.
    _run((_tool("cmake"), "--preset", "dev", *words), "cmake", tree.source)
    _run((_tool("cmake"), "--build", "build/dev", "--target", *_TARGETS), "the compiler", tree.source)
    make_environment(tree)
    stamp.write_text(built_by, encoding="utf-8")
    return tree


def make_environment(tree: Tree) -> None:
    """Create an environment with the commit's package and this Python's packages.

    PYTHONPATH would not suffice: if multiring is installed in place, the import hook of that installation takes
    precedence. Such a hook is installed by a .pth file in a site folder. In the new environment that folder is only a
    path entry, so its .pth files do not run. `former_packages` gives a former commit this checkout's names.
    """
    home = tree.folder / "env"
    venv.EnvBuilder(symlinks=True, with_pip=False).create(home)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(home), "platbase": str(home)}))
    shared = dict.fromkeys((sysconfig.get_path("purelib"), sysconfig.get_path("platlib")))
    lines = [str(tree.source / "src"), str(Path(__file__).parents[1]), "import former_packages", *shared]
    (site / "two_commits.pth").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _tool(name: str) -> str:
    """Return a program from this Python's environment, or else from PATH."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise TreeError(f"there is no {name}: run `make build` first, and this with .venv/bin/python")
    return found


def _said_by(program: str) -> str:
    chosen = inherited_environment().get("CXX", program) if program == "c++" else _tool(program)
    return _run((chosen, "--version"), program).decode(errors="replace").partition("\n")[0]


def _run(words: Sequence[str], what: str, folder: Path | None = None) -> bytes:
    try:
        done = subprocess.run(words, cwd=folder, capture_output=True, check=False)  # noqa: S603 -- our own
    except OSError as error:
        raise TreeError(f"cannot start {words[0]}: {error.strerror}") from None
    if done.returncode != 0:
        said = (done.stdout + done.stderr).decode(errors="replace").rstrip()
        raise TreeError(f"{what} failed, exit code {done.returncode}: {' '.join(words)}\n{said}")
    return done.stdout
