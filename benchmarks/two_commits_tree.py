"""A commit of this repository, unpacked and built in a folder of its own, with a Python that imports that one."""

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

from multiring.settings import inherited_environment

ROOT = Path(__file__).parents[1]
_BUILT = "built"
_TARGETS = ("_core", "_tensorflow", "_jax")  # as `make build`


class TreeError(RuntimeError):
    """There is no such commit, or it cannot be built; the text has what was said."""


@dataclass(frozen=True, slots=True)
class Tree:
    """A commit and where it lies."""

    commit: str
    folder: Path

    @property
    def source(self) -> Path:
        """Its files."""
        return self.folder / "source"

    @property
    def python(self) -> Path:
        """The Python under which `import multiring` means this commit."""
        return self.folder / "env" / "bin" / "python"


def git(*words: str) -> bytes:
    """Return what git prints about this repository.

    Raises:
        TreeError: it failed.
    """
    return _run(("git", "-C", str(ROOT), *words), "git")


def commit_of(name: str) -> str:
    """Return the full name of a commit.

    Raises:
        TreeError: there is none.
    """
    try:
        return git("rev-parse", "--verify", "--quiet", f"{name}^{{commit}}").decode().strip()
    except TreeError:
        raise TreeError(f"{name!r} is no commit of {ROOT}") from None


def has_changes() -> bool:
    """Return whether files that git knows differ from the commit that is checked out."""
    return bool(git("status", "--porcelain", "--untracked-files=no").strip())


def built(commit: str, cache: Path) -> Tree:
    """Return that commit, built as `make build` does it: unpacked into `cache` unless it is there from before.

    The caller's checkout is only read. Both commits are built by the same compiler and tools, against the packages of
    this Python's environment.

    Raises:
        TreeError: it cannot be built.
    """
    tree = Tree(commit, cache / commit[:12])
    built_by = "\n".join((sys.version, sys.prefix, *_TARGETS, *(_said_by(each) for each in ("c++", "cmake", "ninja"))))
    stamp = tree.folder / _BUILT
    if stamp.exists() and stamp.read_text(encoding="utf-8") == built_by:
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
        "MULTIRING_STRICT": "OFF",  # a newer compiler's warnings say nothing about speed
        "MULTIRING_TESTS": "OFF",
    }
    words = [f"-D{name}={value}" for name, value in flags.items()]
    # The commit's own preset, the one that `make build` takes; relative paths are its own too.
    _run((_tool("cmake"), "--preset", "dev", *words), "cmake", tree.source)
    _run((_tool("cmake"), "--build", "build/dev", "--target", *_TARGETS), "the compiler", tree.source)
    make_environment(tree)
    stamp.write_text(built_by, encoding="utf-8")
    return tree


def make_environment(tree: Tree) -> None:
    """Make an environment with the commit's package, and the packages of this Python's.

    Not PYTHONPATH: where multiring is installed in place, an import hook of that installation comes before it. Hooks
    are put in place by .pth files of a site's own folder; this one is only named in another's.
    """
    home = tree.folder / "env"
    venv.EnvBuilder(symlinks=True, with_pip=False).create(home)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(home), "platbase": str(home)}))
    shared = dict.fromkeys((sysconfig.get_path("purelib"), sysconfig.get_path("platlib")))
    lines = [str(tree.source / "src"), *shared]
    (site / "two_commits.pth").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _tool(name: str) -> str:
    """Return a program of this Python's environment, else of PATH."""
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
