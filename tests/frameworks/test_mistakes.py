"""The mistakes of docs/mistakes.md: each raises the error that the page shows."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch  # noqa: F401 -- ranks forked from here need it
from tests.support import mistakes
from tests.support.plain import join
from tests.support.ranks import Here, run_ranks

import multiring.torch as mt

PAGE = Path(__file__).parents[2] / "docs" / "mistakes.md"
JOINS = "import multiring\nmultiring.init()\n"
Command = tuple[dict[str, str], list[str]]
# The files in the folder in which a command runs.
FILES = {
    "joins.py": JOINS,
    "alone.py": "print()\n",
    "hvd.py": "import horovod.torch\n",
    "notes.txt": "of one's own\n",
    "logs/rank-0.out": "of somebody else\n",
}
RUN = [sys.executable, "-m", "multiring", "run"]
ENDS_WELL = ("a script that never joins the job", "`multiring run train.py`, where more ranks were expected")
# The variables and the command of each mistake, by the page's words. The commands run in a folder with the files above.
COMMANDS: dict[str, Command] = {
    "`multiring run -np 2 ...`, the option of other launchers": ({}, [*RUN, "-np", "2", "joins.py"]),
    "`multiring run --nproc-per-node 2 ...`": ({}, [*RUN, "--nproc-per-node", "2", "joins.py"]),
    "`multiring run train.py`, where more ranks were expected": ({}, [*RUN, "joins.py"]),
    "`multiring run -n 2`": ({}, [*RUN, "-n", "2"]),
    "`multiring run -n 2 --time trace.json ...`": ({}, [*RUN, "-n", "2", "--time", "trace.json", "joins.py"]),
    "a script that does not exist": ({}, [*RUN, "-n", "2", "trian.py"]),
    "a script that never joins the job": ({}, [*RUN, "-n", "2", "alone.py"]),
    "`import horovod` without `--horovod`": ({}, [*RUN, "-n", "1", "hvd.py"]),
    "the environment that has multiring is not active": (
        {"PYTHONPATH": ""},
        [*RUN, "-n", "1", "--", sys.executable, "-S", "joins.py"],
    ),
    "a misspelt setting": ({"MULTIRING_STALL_WARN": "5"}, [sys.executable, "joins.py"]),
    "a setting with an invalid value": ({"MULTIRING_STALL_WARN_S": "a minute"}, [sys.executable, "joins.py"]),
    "RANK and WORLD_SIZE of another launcher are still set": (
        {"RANK": "0", "WORLD_SIZE": "2"},
        [sys.executable, "joins.py"],
    ),
    "MULTIRING_RANK without MULTIRING_SIZE": ({"MULTIRING_RANK": "0"}, [sys.executable, "joins.py"]),
    "an output file that would replace another file, as in `multiring plan --save notes.txt`": (
        {},
        [sys.executable, "-m", "multiring", "plan", "--hosts", "1", "--slots", "2", "--save", "notes.txt"],
    ),
    "`--log-dir` with a folder of other files": ({}, [*RUN, "-n", "2", "--log-dir", "logs", "joins.py"]),
    "an interface that does not exist": (
        {"MULTIRING_ENGINE": "tcp", "MULTIRING_INTERFACE": "eth9"},
        [*RUN, "-n", "2", "joins.py"],
    ),
}


def rows() -> dict[str, tuple[str, str]]:
    """Return the page's messages and remedies by mistake."""
    cells = [line.strip("| \n").split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    found = {each[0]: (plain(each[1]), each[2]) for each in cells if each[0] != "mistake"}
    assert len(found) == len([each for each in cells if each[0] != "mistake"]), "the page lists a mistake twice"
    return found


def plain(code: str) -> str:
    """Return the text of a code span.

    A span with backticks inside begins and ends with two backticks and a space.
    """
    return code.removeprefix("`` ").removesuffix(" ``") if code.startswith("`` ") else code.strip("`")


def pattern(message: str) -> str:
    return ".*".join(re.escape(part) for part in message.split("..."))


def make_alone(_: Here, folder: str) -> dict[str, str]:
    return mistakes.make_alone(folder)


def make_together(here: Here, folder: str) -> dict[str, str]:
    join(here)
    said = mistakes.make_together(folder)
    assert mt.size() == 2
    return said


def test_the_page_has_each_mistake_and_what_is_said(tmp_path: Path) -> None:
    page = rows()
    assert set(page) == {*mistakes.alone, *mistakes.together, *COMMANDS}
    assert len(page) >= 30
    assert all(remedy for _, remedy in page.values())
    [said] = run_ranks(make_alone, 1, str(tmp_path))
    for what, text in said.items():
        assert re.fullmatch(pattern(page[what][0]), text, re.DOTALL), f"{what}: {text}"


def test_ranks_are_told_of_mistakes_and_go_on(tmp_path: Path) -> None:
    page = rows()
    by_rank = run_ranks(make_together, 2, str(tmp_path), stall_warn_s=6.0)
    for what in mistakes.together:
        told = [said[what] for said in by_rank]
        assert all(told), f"{what}: only some ranks got an error: {told}"
        assert any(re.fullmatch(pattern(page[what][0]), text, re.DOTALL) for text in told), f"{what}: {told}"


@pytest.mark.parametrize("what", COMMANDS)
def test_commands_say_what_the_page_says(what: str, tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    variables, command = COMMANDS[what]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert re.search(pattern(rows()[what][0]), done.stderr, re.DOTALL), done.stderr
    assert (done.returncode == 0) is (what in ENDS_WELL), done.returncode
