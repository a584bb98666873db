"""docs/vision_start.md: its commands, in order, as a reader types them."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

from tests.frameworks.test_documents import ONE_THREAD
from tests.support.model_servers import running_server
from tests.support.page_blocks import BLOCK, ROOT

PAGE = ROOT / "docs" / "vision_start.md"
SHORTER = " --size 32 --epochs 2"  # the page's own recipe takes minutes
BEGINS = ("python", "multiring", "curl")


def run(folder: Path, command: str) -> "subprocess.CompletedProcess[str]":
    words = [{"python": sys.executable}.get(each, each) for each in shlex.split(command)]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        words, cwd=folder, env={**ONE_THREAD, "PATH": path}, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, (command, done.stdout, done.stderr)
    return done


# Eight commands, each with its imports.
def test_the_commands_lead_from_pictures_to_an_answer(tmp_path: Path) -> None:
    blocks = list(BLOCK.finditer(PAGE.read_text(encoding="utf-8")))
    [program] = [each for each in blocks if each["kind"] == "python"]
    (tmp_path / program["file"]).write_text(program["text"], encoding="utf-8")
    lines = [line for each in blocks if each["kind"] == "sh" for line in each["text"].splitlines()]
    commands = [line for line in lines if line.startswith(BEGINS)]
    *before, served, ask = commands
    assert served.startswith("multiring vision serve")
    _, option, file, address = ask.split()
    assert option == "--data-binary"  # curl sends the file as it is
    picture = tmp_path / file.removeprefix("@")
    said = [run(tmp_path, each + SHORTER * ("vision train" in each)).stdout for each in before]
    assert "80 pictures, 0 of them copied, 80 labels" in said[1]
    assert (tmp_path / "pictures/runs/check.html").exists()
    [answer] = map(json.loads, (tmp_path / "answers.jsonl").read_text().splitlines())
    assert answer["picture"] == "question.png"
    [model] = served.split()[3:]
    with running_server(tmp_path / model) as server:
        asked = json.loads(server.ask("POST", urlsplit(address).path, picture.read_bytes())[2])
    [tried] = asked["answers"]
    assert tried["labels"] == answer["labels"]
