"""Run pages of docs as they stand: scripts, console commands and their output."""

import os
import subprocess
import sys
from itertools import groupby
from pathlib import Path

import pytest
from tests.frameworks.page_blocks import BLOCK, DOCUMENTS

DOCS = Path(__file__).parents[2] / "docs"
# With several threads per process, a test takes minutes on busy cores.
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}
PROGRAMS = {
    "python": [sys.executable],
    "multiring": [sys.executable, "-m", "multiring"],
    "torchrun": [sys.executable, "-m", "torch.distributed.run"],
}
# torch sometimes prints this when a program with Gloo ends: a thread of Gloo releases its last tensor while the
# interpreter exits (pytorch/pytorch#190489). The program has not loaded multiring.
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
    """Return each command of a console block with its output lines."""
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
    """Return whether `lines` match `wanted`, in which "..." stands for any lines."""
    if "..." not in wanted:
        return lines == wanted
    pieces = [list(piece) for is_gap, piece in groupby(wanted, lambda line: line == "...") if not is_gap]
    return all(any(lines[i : i + len(piece)] == piece for i in range(len(lines))) for piece in pieces)
