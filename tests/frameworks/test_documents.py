"""Run pages of docs as they stand: scripts, console commands and their output."""

import os
import re
import subprocess
import sys
from itertools import groupby
from pathlib import Path

import pytest
from tests.support.page_blocks import BLOCK, DOCUMENTS
from tests.support.program_ranks import environment_of
from tests.support.ranks import Process
from tests.support.scripts import Start, run_script
from torch.distributed import TCPStore  # type: ignore[attr-defined] # torch defines it

DOCS = Path(__file__).parents[2] / "docs"
# With several threads per process, a test takes minutes on busy cores.
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}
PROGRAMS = {
    "python": [sys.executable],
    "multiring": [sys.executable, "-m", "multiring"],
}
# Scripts of the pages that import torch. Their ranks are forked, because each import takes seconds; the other commands
# run as shown. "differs.py" needs the launcher, which prints its traceback.
FORKED = ("single.py", "train.py", "ddp.py", "fewer.py", "events.py", "script.py", "train_digits.py")
COMMAND = re.compile(
    r"(?P<how>python|multiring run -n (?P<ranks>\d+)(?: -- python)?|torchrun --nproc-per-node (?P<pair>\d+)) "
    rf"(?P<script>{'|'.join(map(re.escape, FORKED))})(?P<words>.*)"
)
LOADED = Process(nursery="torch", beforehand=("multiring.training", "torch.nn.parallel", "sklearn.datasets"))


@pytest.mark.parametrize(("document", "count"), DOCUMENTS.items())
def test_documents_print_what_they_say(document: str, count: int, tmp_path: Path) -> None:
    ran = []
    for block in BLOCK.finditer((DOCS / document).read_text()):
        if block["kind"] != "console" and block["file"]:
            (tmp_path / block["file"]).write_text(block["text"])
        if block["kind"] == "console":
            for command, wanted in commands(block["text"]):
                ran.append(command)
                found = COMMAND.fullmatch(command)
                lines = forked(found, tmp_path) if found else run(command, tmp_path)
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


def forked(command: re.Match[str], where: Path) -> list[str]:
    """Return the lines of a command whose ranks are forked after the imports."""
    ranks = int(command["ranks"] or command["pair"] or 1)
    variables: tuple[dict[str, str], ...] = ()
    if command["pair"]:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        variables = tuple(environment_of(rank, ranks, store.port) for rank in range(ranks))
    start = Start(alone=not command["ranks"], environments=variables, folder=str(where))
    ended = run_script(where / command["script"], ranks, *command["words"].split(), process=LOADED, start=start)
    assert all(code == 0 for code, _ in ended), ended
    lines = [(rank, line) for rank, (_, told) in enumerate(ended) for line in told.splitlines()]
    return [f"[{rank}] {line}" if command["ranks"] else line for rank, line in lines]


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
