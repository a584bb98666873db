"""All code on the pages: tests run it, or a table says why they do not."""

import os
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.frameworks.test_documents import ONE_THREAD
from tests.support.page_blocks import ROOT, commands_shown, scripts_of_the_diff, shown
from tests.support.page_commands import COMMANDS, Read, Run
from tests.support.page_snippets import NOT_RUN, SNIPPETS, live
from tests.support.ranks import Process, run_ranks

from multiring import _cli as cli
from multiring.errors import MultiringError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FRAMEWORKS = {
    "": Process(),
    "torch": Process(nursery="torch", beforehand=("tests.support.plain", "torch.nn.parallel")),
    "jax": Process(nursery="jax", beforehand=("multiring.jax",)),
    "keras": Process(nursery="keras", beforehand=("tests.support.keras_programs",)),
}
# The content of `train.py` if a page does not show it. It also runs with `--horovod`.
TRAIN = """
import multiring
group = multiring.init()
group.barrier()
print(group.rank, "of", group.size)
"""
MENTIONED = re.compile(r"(?:\.venv/bin/python |--options )(\S+)|(?:python) (examples/\S+)|-m (examples\.\S+)")


def python_blocks() -> dict[tuple[str, str], str]:
    return {(block.page, block.title): block.text for block in shown("python") if not block.is_run}


def test_the_tables_have_what_the_pages_show() -> None:
    blocks = [(each.page, each.title) for each in shown("python") if not each.is_run]
    assert len(set(blocks)) == len(blocks), "two blocks of a page have the same first line"
    assert set(blocks) == {*SNIPPETS, *NOT_RUN}
    assert not set(SNIPPETS) & set(NOT_RUN)
    commands = {(each.page, each.text) for each in commands_shown() if not each.is_run}
    assert commands == set(COMMANDS)
    reasons = [*NOT_RUN.values(), *(each.why for each in COMMANDS.values() if isinstance(each, Read))]
    named = {name for reason in reasons for name in re.findall(r"tests/\S+\.py", reason)}
    assert all((ROOT / name).exists() for name in named), named


@pytest.mark.parametrize("title", SNIPPETS, ids=[f"{page}: {title[:30]}" for page, title in SNIPPETS])
def test_what_pages_show_of_a_program_runs(
    title: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    framework = SNIPPETS[title].framework
    if framework not in ("", "torch") and find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")
    monkeypatch.setenv("KERAS_BACKEND", "tensorflow")
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "3")
    process = FRAMEWORKS[framework]
    run_ranks(live, 2, title, python_blocks()[title], str(tmp_path), process=process, deadline_s=240.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which commands run, with the files that pages mention.

    Later commands use files that earlier commands wrote.
    """
    place = tmp_path_factory.mktemp("pages")
    (place / "train.py").write_text(TRAIN)
    single, distributed = scripts_of_the_diff()
    (place / "single.py").write_text(single)
    (place / "program.py").write_text(distributed)
    topology = next(each.text for each in shown("toml") if each.page == "topology.md")
    for name in ("topology.toml", "summit.toml"):
        (place / name).write_text(topology)
    return place


# About fifteen commands run in sequence, because some need the files of earlier commands.
def test_commands_of_pages_do_what_they_say(folder: Path) -> None:
    for (page, command), how in COMMANDS.items():
        if not isinstance(how, Run):
            continue
        words = shlex.split(how.instead or command)
        settings = dict(each.split("=", 1) for each in words if re.match("[A-Z_]+=", each))
        words = [{"python": sys.executable}.get(each, each) for each in words if each not in _assignments(settings)]
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(
            words,
            cwd=folder,
            env={**ONE_THREAD, **settings, "PATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, (page, command, done.stdout)
        assert how.says in done.stdout, (page, command, done.stdout)
        assert not how.makes or (folder / how.makes).stat().st_size > 0, (page, command)


def test_readme_changes_five_lines_and_no_loss(folder: Path) -> None:
    [diff] = shown("diff")
    assert len(re.findall(r"^[+-]", diff.text, re.MULTILINE)) == 5
    done = subprocess.run(
        [sys.executable, "single.py"],
        cwd=folder,
        env=ONE_THREAD,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    how = COMMANDS["README.md", "multiring run -n 2 train.py"]
    assert isinstance(how, Run)
    assert done.stdout == how.says.replace("[0] ", ""), done.stderr


def _assignments(settings: dict[str, str]) -> set[str]:
    return {f"{name}={value}" for name, value in settings.items()}


def test_other_commands_have_options_extras_and_files_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[object] = []

    def noting(arguments: object) -> int:
        ran.append(arguments)
        return 0

    for module in set(cli.COMMANDS.values()):
        monkeypatch.setattr(module, "run", noting)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page, command in COMMANDS:
        words = shlex.split(command.removeprefix("sudo "))
        begins = [at for at, word in enumerate(words) if word == "multiring" and words[0] not in ("cd", "git", "pip")]
        if words[0] == "podman":  # its last word of that name is the command, and others name the image
            begins = [at for at in begins[-1:] if words[at + 1] in cli.COMMANDS]
        for at in begins:
            before = len(ran)
            assert cli.main(words[at + 1 :]) == 0, (page, command)
            assert len(ran) == before + 1
        if words[0] == "make":
            assert words[1] in targets, (page, command)
        if words[0] == "pip":
            named = {each for group in re.findall(r"(?:\.|multiring)\[(.*)\]", command) for each in group.split(",")}
            assert named <= set(extras), (page, command)
        for script, example, module_name in MENTIONED.findall(command):
            path = script or example or module_name.replace(".", "/") + ".py"
            assert (ROOT / path).is_file(), (page, command, path)


def test_an_option_that_is_not_there_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli.COMMANDS["plan"], "run", lambda _: 0)
    with pytest.raises((SystemExit, MultiringError)):
        cli.main(["plan", "--sises", "1MiB"])
