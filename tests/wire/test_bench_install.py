"""Creating an environment for a library: once, completely, or with a reason for the failure.

Nothing is downloaded: the recipe runs pip's help. A script plays `python -m venv`; its environments are this one. A
real `venv` takes many seconds on a busy machine; `make peers` creates real ones.
"""

import shlex
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from multiring._bench import install as installing
from multiring._bench.install import Recipe, install, installed
from multiring.errors import ArgumentError, LaunchError

HELP = Recipe(steps=(("--help",),))  # `pip install --help` succeeds and installs nothing


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list for the messages of `install`. Environments go to a new folder, and "it" has a recipe."""
    monkeypatch.setenv("MULTIRING_BENCH_PEERS", str(tmp_path / "peers"))
    monkeypatch.setitem(installing.RECIPES, "it", HELP)
    again = f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n'
    venv = tmp_path / "python"
    venv.write_text(
        '#!/bin/sh\n[ "$1 $2" = "-m venv" ] && mkdir -p "$3/bin" && '
        f'printf %s {shlex.quote(again)} > "$3/bin/python" && chmod +x "$3/bin/python"\n'
    )
    venv.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(venv))
    return []


def test_an_environment_is_made_once_and_again_when_the_recipe_changes(
    told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = install("it", told.append)
    assert installed("it") == folder
    assert [line.partition(":")[0] for line in told] == ["it"] * 3
    assert "pip install --help" in told[1]
    (folder / "mark").touch()
    told.clear()
    install("it", told.append)
    assert told == [f"it: is in {folder}"]
    assert (folder / "mark").exists()
    monkeypatch.setitem(installing.RECIPES, "it", replace(HELP, variables={"ANOTHER": "1"}))
    with pytest.raises(LaunchError, match="another version than the one wanted"):
        installed("it")
    install("it", told.append)
    assert installed("it") == folder
    assert not (folder / "mark").exists()


def test_a_step_that_fails_is_told_with_what_it_wrote_and_nothing_counts_as_installed(
    told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(installing.RECIPES, "it", Recipe(steps=(("--no-such-option",),)))
    with pytest.raises(LaunchError, match=r"(?s)cannot install it: .* --no-such-option ended with 2.*no such option"):
        install("it", told.append)
    with pytest.raises(LaunchError, match="it is not installed"):
        installed("it")


def test_an_unknown_name_is_told_with_the_known_ones(told: list[str]) -> None:
    with pytest.raises(
        ArgumentError, match=r"no recipe to install 'gloo', want one of chainer, horovod, it, mpich, openmpi"
    ):
        install("gloo", told.append)


def test_a_missing_compiler_is_told_before_anything_is_made(told: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(installing.RECIPES, "it", Recipe(steps=HELP.steps, tools=("no-such-compiler",)))
    with pytest.raises(LaunchError, match="it needs 'no-such-compiler', which is not on PATH"):
        install("it", told.append)
    assert told == []


def test_an_older_python_is_looked_for_where_the_library_needs_it(
    told: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(installing.RECIPES, "it", replace(HELP, newest_python=(3, 11)))
    monkeypatch.setattr(sys, "version_info", (3, 14, 0))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        LaunchError, match=r"needs Python 3.11 or older, but this is Python 3.14; put python3.11 or python3.10"
    ):
        install("it", told.append)
    older = tmp_path / "python3.10"
    older.write_text("#!/bin/sh\necho not really; exit 3\n")
    older.chmod(0o755)
    with pytest.raises(LaunchError, match=rf"{older} -m venv .* ended with 3; it wrote:\n    not really"):
        install("it", told.append)


def test_a_folder_that_cannot_be_made_is_told(told: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("MULTIRING_BENCH_PEERS", str(tmp_path / "file"))
    with pytest.raises(LaunchError, match=rf"cannot install it in {tmp_path}/file/it: .*MULTIRING_BENCH_PEERS names"):
        install("it", told.append)
