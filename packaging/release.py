"""Check, build and tag a release of this checkout: python packaging/release.py [--dry-run] [--pythons PATH...].

The checks come first: git has no changes, the version is the same everywhere, CHANGELOG.md has a dated heading for
the version, and the tag is free. Then the script builds dist/ (an sdist) and wheelhouse/ (a wheel for each Python), and
checks the wheels as `make wheel-check` does. The tag comes last. The script pushes and uploads nothing. `make release`
calls it with .venv's programs on PATH. docs/releasing.md is the checklist around it.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = ("python3.10", "python3.11", "python3.12")  # the wheel of 3.12 serves every later version
VERSION_FILES = {
    "src/multiring/_version.py": r'^VERSION = "(.+)"$',
    "CITATION.cff": r"^version: (.+)$",
    "packaging/conda/recipe.yaml": r'^  version: "(.+)"$',
}
HEADING = re.compile(r"^## (.+)$", re.MULTILINE)


class ReleaseError(Exception):
    """The release cannot be made; the text says what to do."""


def git(root: Path, *words: str) -> str:
    """Run git and return its output without surrounding white space."""
    done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ReleaseError(f"git {' '.join(words)} failed: {done.stderr.strip()}")
    return done.stdout.strip()


def version_of(root: Path) -> str:
    """Return the version that the build reads."""
    return versions(root)["src/multiring/_version.py"]


def versions(root: Path) -> dict[str, str]:
    """Return the version that each file of `VERSION_FILES` states."""
    found = {}
    for name, pattern in VERSION_FILES.items():
        match = re.search(pattern, (root / name).read_text(encoding="utf-8"), re.MULTILINE)
        if match is None:
            raise ReleaseError(f"{name} states no version: want a line that matches {pattern}")
        found[name] = match[1]
    return found


def problems(root: Path, today: date) -> list[str]:
    """Return the problems that block the release, one sentence each."""
    found = []
    changed = git(root, "status", "--porcelain")
    if changed:
        found.append(f"git status lists changes: commit or remove them:\n{changed}")
    version = version_of(root)
    for name, stated in versions(root).items():
        if stated != version:
            found.append(f"{name} states version {stated}: want {version}, which src/multiring/_version.py states")
    heading = HEADING.search((root / "CHANGELOG.md").read_text(encoding="utf-8"))
    wanted = f"{version} ({today.isoformat()})"
    if heading is None or heading[1] != wanted:
        stated = "nothing" if heading is None else repr(heading[1])
        found.append(f"CHANGELOG.md's first heading is {stated}: want {wanted!r}")
    if git(root, "tag", "--list", f"v{version}"):
        found.append(f"the tag v{version} exists: raise the version in src/multiring/_version.py")
    return found


def interpreters(names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the paths of the interpreters that run, and the problems of the others, one sentence each."""
    paths, found = [], []
    for name in names:
        path = shutil.which(name)
        if path is None:
            found.append(f"{name}: not found on PATH; install it, or name a path with --pythons")
            continue
        # A shim of pyenv is on PATH for each installed version, but runs only those that pyenv's settings select.
        done = subprocess.run([path, "-c", ""], capture_output=True, text=True, check=False)
        if done.returncode:
            reason = done.stderr.strip().partition("\n")[0]
            found.append(f"{name}: {path} does not run ({reason}); mend it, or name a path with --pythons")
            continue
        paths.append(path)
    return paths, found


def run(*command: str | Path, cwd: Path) -> None:
    """Run a command and show its output; raise ReleaseError if it fails."""
    sys.stdout.write(f"$ {' '.join(map(str, command))}\n")
    sys.stdout.flush()
    # With PYTHONPATH, Python would import this checkout instead of the installed package.
    done = subprocess.run(["env", "-u", "PYTHONPATH", *map(str, command)], cwd=cwd, check=False)
    if done.returncode:
        raise ReleaseError(f"{command[0]} failed with exit code {done.returncode}; its output is above")


def build(root: Path, pythons: Sequence[str]) -> list[Path]:
    """Build dist/ and wheelhouse/; return the wheels.

    Each wheel is built from the sdist, in an environment of its own, with the build tools of constraints.txt.
    """
    run(root / ".ci" / "sdist", cwd=root)
    (sdist,) = (root / "dist").glob("multiring-*.tar.gz")
    wheelhouse = root / "wheelhouse"
    shutil.rmtree(wheelhouse, ignore_errors=True)
    for python in pythons:
        with tempfile.TemporaryDirectory(prefix="multiring-release-") as folder:
            place = Path(folder)
            run(python, "-m", "venv", place / "env", cwd=place)
            tools = ("scikit-build-core", "nanobind", "cmake", "ninja")
            pip = (place / "env" / "bin" / "python", "-m", "pip")
            run(*pip, "install", "--quiet", "-c", root / "constraints.txt", *tools, cwd=place)
            run(*pip, "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", place / "raw", sdist, cwd=place)
            (raw,) = (place / "raw").glob("*.whl")
            run(sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", wheelhouse, raw, cwd=place)
    return sorted(wheelhouse.glob("multiring-*.whl"))


def check_wheels(root: Path, wheels: Sequence[Path], pythons: Sequence[str]) -> None:
    """Check the contents of the wheels; then install each as an ordinary user, and run the demo."""
    run(root / ".ci" / "wheel-contents", *wheels, cwd=root)
    run(root / ".ci" / "wheel-check", *pythons, cwd=root)


def release(root: Path, today: date, pythons: Sequence[str], *, is_dry: bool) -> None:
    """Check the checkout, build the packages, check them, and make the tag.

    A dry run lists the problems first and again at the end. It builds with the interpreters that run.
    """
    paths, missing = interpreters(pythons)
    found = [*problems(root, today), *missing]
    if found and not is_dry:
        raise ReleaseError("\n".join(found))
    version = version_of(root)
    if is_dry:
        lines = [f"would build multiring {version}: an sdist, and a wheel for each of {', '.join(paths) or 'none'}"]
        lines += [f"would make the tag v{version}"] if not found else [f"would stop: {each}" for each in found]
        sys.stdout.write("".join(f"dry run: {each}\n" for each in lines))
    wheels = build(root, paths)
    if wheels:
        check_wheels(root, wheels, paths)
    for path in wheels:
        sys.stdout.write(f"built and checked: {path.relative_to(root)}\n")
    if found:
        raise ReleaseError("\n".join(found))
    if is_dry:
        sys.stdout.write("dry run: everything passed; no tag was made\n")
        return
    git(root, "tag", "--annotate", f"v{version}", "--message", f"multiring {version}")
    sys.stdout.write(f"made the tag v{version}; publish it with: git push origin v{version}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0 after a release or a dry run without problems, else 1."""
    parser = argparse.ArgumentParser(description="Check, build and tag a release of this checkout.")
    parser.add_argument("--dry-run", action="store_true", help="do all but the tag; list problems at the end")
    parser.add_argument("--pythons", nargs="+", default=PYTHONS, help="interpreters to build wheels with")
    options = parser.parse_args(arguments)
    try:
        release(ROOT, date.today(), options.pythons, is_dry=options.dry_run)  # noqa: DTZ011 -- the maintainer's day
    except ReleaseError as error:
        sys.stderr.write(f"release: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
