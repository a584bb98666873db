"""docs/vision_start.md: its commands, in order, as a reader types them."""

import json
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from tests.frameworks.test_documents import ONE_THREAD
from tests.support.model_servers import RunningServer
from tests.support.page_blocks import BLOCK, ROOT

PAGE = ROOT / "docs" / "vision_start.md"
SHORTER = " --size 32 --epochs 2"  # the page's own recipe takes minutes
BEGINS = ("python", "multiring", "curl")


def run(folder: Path, command: str) -> "subprocess.CompletedProcess[str]":
    words = [{"python": sys.executable}.get(each, each) for each in shlex.split(command)]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        words, cwd=folder, env={**ONE_THREAD, "PATH": path}, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, (command, done.stdout, done.stderr)
    return done


# Eight commands, each with its imports.
@pytest.mark.timeout(300)
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
    words = [sys.executable, "-u", "-m", *shlex.split(served), "--port", "0"]
    server = subprocess.Popen(words, cwd=tmp_path, env={**os.environ, **ONE_THREAD}, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        began_s, port = time.monotonic(), ""
        while not port and time.monotonic() - began_s < 100:
            port = "".join(re.findall(r"127\.0\.0\.1:(\d+)", server.stdout.readline()))
        path = urlsplit(address).path
        asked = json.loads(RunningServer(process=server, port=int(port)).ask("POST", path, picture.read_bytes())[2])
    finally:
        server.terminate()
        server.communicate(timeout=30)
    [tried] = asked["answers"]
    assert tried["labels"] == answer["labels"]
