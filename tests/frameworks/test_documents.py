"""Pages of docs, run as they stand: their scripts, their console commands, and what those print."""

import os
import subprocess
import sys
from itertools import groupby
from pathlib import Path

import pytest
from tests.frameworks.page_blocks import BLOCK, DOCUMENTS

DOCS = Path(__file__).parents[2] / "docs"
# Threads that wait for each other on cores that others use take minutes.
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}
PROGRAMS = {
    "python": [sys.executable],
    "multiring": [sys.executable, "-m", "multiring"],
    "torchrun": [sys.executable, "-m", "torch.distributed.run"],
}
# What torch does now and then when a program over Gloo ends: a thread of Gloo lets go of its last tensor while the
# interpreter is going (pytorch/pytorch#190489). Nothing of multiring is loaded there.
ENDS_BADLY = "terminate called without an active exception"


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("document", "count"), DOCUMENTS.items())
def test_documents_print_what_they_say(document: str, count: int, tmp_path: Path) -> None:
    ran = []
    for block in BLOCK.finditer((DOCS / document).read_text()):
        if block["kind"] != "console" and block["file"]:
            (tmp_path / block["file"]).write_text(block["text"])
        if block["kind"] == "console":
            for command, wanted in commands(block["text"]):
                ran.append(command)
                lines = run(command, tmp_path)
                if command.startswith("torchrun") and any(ENDS_BADLY in line for line in lines):
                    lines = run(command, tmp_path)
                assert prints(lines, wanted), (command, lines)
    assert len(ran) == count


def commands(text: str) -> list[tuple[str, list[str]]]:
    """Return each command of a console block with the lines that follow it."""
    found: list[tuple[str, list[str]]] = []
    for line in text.splitlines():
        if line.startswith("$ "):
            found.append((line[2:], []))
        else:
            found[-1][1].append(line)
    return found


def run(command: str, where: Path) -> list[str]:
    words = [word for each in command.split() for word in PROGRAMS.get(each, [each])]
    done = subprocess.run(
        words,
        cwd=where,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=ONE_THREAD,
        timeout=250,
        check=False,
    )
    return done.stdout.splitlines()


def prints(lines: list[str], wanted: list[str]) -> bool:
    """Whether `lines` are those of `wanted`, where "..." stands for any."""
    if "..." not in wanted:
        return lines == wanted
    pieces = [list(piece) for is_gap, piece in groupby(wanted, lambda line: line == "...") if not is_gap]
    return all(any(lines[i : i + len(piece)] == piece for i in range(len(lines))) for piece in pieces)
