"""`multiring run --page` and `--record`: a job seen while it runs, hostile clients, killed launchers and ranks."""

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from multiring._launch.live_record import read_record

LIMIT_S = 240.0
TOKEN = "a-token-of-enough-characters"  # noqa: S105 -- of the tests alone
PROGRAM = """
import math, os, sys, time
from pathlib import Path
import numpy as np
import multiring

group = multiring.init()
step, there = 0, Path(sys.argv[1])
there.with_name(f"pid-{group.rank}").write_text(str(os.getpid()))
while True:
    step += 1
    more = np.array([there.exists()], np.float32)
    group.all_reduce(more)
    multiring.log_metrics(step=step, loss=math.nan, **{"<script>document.title='x'</script>": 1e308})
    if not more[0]:
        break
    time.sleep(0.002 if group.rank else 0.01)
"""


class WatchedJob:
    """`multiring run` with a page; `ask` sends it a request."""

    def __init__(self, *arguments: str, cwd: Path) -> None:
        command = [sys.executable, "-m", "multiring", "run", *arguments]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, cwd=cwd, text=True, start_new_session=True)
        self.said = ""
        assert self.process.stderr is not None
        while "its metrics" not in self.said:
            line = self.process.stderr.readline()
            assert line, self.said
            self.said += line
        self.port = int(self.said.rpartition("/metrics")[0].rpartition(":")[2])

    def ask(self, path: str, method: str = "GET", body: str | None = None, **headers: str) -> tuple[int, str]:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=LIMIT_S)
        with contextlib.closing(connection):
            connection.request(method, path, body, {each.replace("_", "-"): text for each, text in headers.items()})
            answer = connection.getresponse()
            return answer.status, answer.read().decode()

    def wait_for(self, holds: Callable[[Any], Any], **headers: str) -> Any:
        """Return what the page shows once a condition on it holds."""
        until = time.monotonic() + LIMIT_S
        while not holds(job := json.loads(self.ask("/api/job", **headers)[1])):
            assert time.monotonic() < until, job
            time.sleep(0.1)
        return job

    def end(self) -> tuple[int, str]:
        rest = self.process.communicate(timeout=LIMIT_S)[1]
        return self.process.returncode, self.said + rest


@pytest.fixture
def program(tmp_path: Path) -> list[str]:
    """Return a command whose ranks take steps as long as the file `there` exists."""
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "there").touch()
    return ["--", sys.executable, str(tmp_path / "program.py"), str(tmp_path / "there")]


@pytest.fixture
def watch(tmp_path: Path, program: list[str]) -> Iterator[Callable[..., WatchedJob]]:
    started: list[WatchedJob] = []

    def start(*arguments: str) -> WatchedJob:
        started.append(WatchedJob(*arguments, *program, cwd=tmp_path))
        return started[-1]

    yield start
    for each in started:
        each.process.kill()
        each.process.communicate()


def has_steps(job: Any) -> bool:
    return bool(job["ranks"]) and all(sum(each["step"].values()) > 0 for each in job["ranks"])


@pytest.mark.parametrize("where", [("-n", "2"), ("--hosts", "localhost:2")], ids=("one host", "by an agent"))
def test_a_job_is_seen_while_it_runs_and_after_a_restart(
    watch: Callable[..., WatchedJob], tmp_path: Path, where: tuple[str, str]
) -> None:
    running = watch(*where, "--page", "0", "--log-dir", "logs", "--max-restarts", "1")
    job = running.wait_for(has_steps)
    assert job["curves"]["loss"][-1][1] == "NaN"
    assert job["ranks"][1]["step"]["waiting"] > 0
    found = text_string_to_metric_families(running.ask("/metrics")[1])  # type: ignore[no-untyped-call]  # it has no types
    families = {each.name: each for each in found}
    assert {each.labels["rank"] for each in families["multiring_steps"].samples} == {"0", "1"}
    assert running.ask("/")[0] == 200
    victim = (tmp_path / "pid-1").read_text()
    os.kill(int(victim), signal.SIGKILL)
    job = running.wait_for(lambda found: found["starts"] == 2 and has_steps(found))
    assert any("killed by SIGKILL" in text for _, text in job["texts"])
    (tmp_path / "there").unlink()
    assert running.end()[0] == 0
    lines = list(read_record((tmp_path / "logs" / "record.jsonl").read_bytes()))
    assert [each["code"] for each in lines if each["kind"] == "ended" and each["code"] == -signal.SIGKILL]
    assert [each["start"] for each in lines if each["kind"] == "start"] == [0, 1]
    assert (lines[0]["program"], lines[-1]["kind"], lines[-1]["code"]) == ("program.py", "over", 0)
    with pytest.raises(ConnectionRefusedError):
        running.ask("/")


def test_a_program_that_never_steps_has_a_record(tmp_path: Path) -> None:
    command = [
        "run",
        "-n",
        "2",
        "--record",
        "r.jsonl",
        "--",
        sys.executable,
        "-c",
        "import multiring; multiring.init()",
    ]
    subprocess.run([sys.executable, "-m", "multiring", *command], cwd=tmp_path, check=True, timeout=LIMIT_S)
    lines = list(read_record((tmp_path / "r.jsonl").read_bytes()))
    reports = [each for each in lines if each["kind"] == "steps"]
    assert {each["rank"] for each in reports} == {0, 1}
    assert all((each["steps"], each["idle_s"]) == (0, None) for each in reports)
    assert {each["code"] for each in lines if each["kind"] == "ended"} == {0}


def test_the_page_is_closed_to_strangers(watch: Callable[..., WatchedJob], tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.touch(0o600)
    file.write_text(TOKEN)
    running = watch("-n", "1", "--page", "0.0.0.0:0", "--page-token-file", str(file))
    for path in ("/api/job", "/metrics", f"/api/job?token={TOKEN}"):
        assert running.ask(path)[0] == 401
        assert running.ask(path, authorization=f"Bearer {TOKEN}x")[0] == 401
        assert running.ask(path, cookie=f"multiring_run={TOKEN}")[0] == 401
    running.wait_for(has_steps, authorization=f"Bearer {TOKEN}")
    assert running.ask("/")[0] == 200
    assert json.loads(running.ask("/api/session")[1]) == {"is_let_in": False}
    for body in ('{"token":"wrong"}', "{", "[]", "[" * 4000, ""):
        assert running.ask("/api/session", "POST", body, x_multiring="run")[0] == 401
    assert running.ask("/api/session", "POST", json.dumps({"token": TOKEN}))[0] == 403  # a page of another site
    assert running.ask("/api/session", "POST", json.dumps({"token": TOKEN}), x_multiring="run")[0] == 200
    assert running.ask("/api/job", "DELETE", x_multiring="run", authorization=f"Bearer {TOKEN}")[0] == 405
    assert running.ask("/page/live.html", authorization=f"Bearer {TOKEN}")[0] == 404
    assert running.ask("/", host="evil.example")[0] == 421
    assert TOKEN not in Path(f"/proc/{running.process.pid}/cmdline").read_text() + running.said


def test_clients_that_do_not_speak_or_read_harm_nobody(watch: Callable[..., WatchedJob], tmp_path: Path) -> None:
    running = watch("-n", "1", "--page", "0", "--record", "r.jsonl")
    before = running.wait_for(has_steps)["ranks"][0]["number"]
    heads = (b"", b"GET /metrics HTTP/1.1\r\n\r\n", b"\xff" * 20_000, b"GET / HTTP/1.1\r\n")
    clients = []
    for number in range(600):
        with contextlib.suppress(OSError):
            clients.append(socket.create_connection(("127.0.0.1", running.port), timeout=LIMIT_S))
            clients[-1].sendall(heads[number % 4])
    for each in clients:
        each.close()

    def answers(_: None = None) -> bool:
        with contextlib.suppress(OSError):
            return running.ask("/metrics")[0] == 200
        return False

    until = time.monotonic() + LIMIT_S
    while not answers():
        assert time.monotonic() < until
    running.wait_for(lambda job: job["ranks"][0]["number"] > before + 10)
    for head in (
        "GET / HTTP/1.1\r\nhost: localhost\r\ncontent-length: 99999999\r\n",
        "GET\r\n",
        "GET / HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n",
        "GET / HTTP/1.1\r\nbad header: 1\r\n",
    ):
        with socket.create_connection(("127.0.0.1", running.port), timeout=LIMIT_S) as client:
            client.sendall(head.encode() + b"\r\n")
            assert client.recv(20).startswith(b"HTTP/1.1 400 ")
    (tmp_path / "there").unlink()
    assert running.end()[0] == 0


def test_wrong_options_start_no_rank(tmp_path: Path, program: list[str]) -> None:
    (tmp_path / "open").write_text(TOKEN)
    (tmp_path / "notes").write_text("notes")
    taken = socket.create_server(("127.0.0.1", 0))
    port = str(taken.getsockname()[1])
    for words, error in (
        (("--page", port), "Another program may use the port"),
        (("--page", "0.0.0.0:0"), "so it needs a --page-token-file"),
        (("--page", "0", "--page-token-file", "open"), "run chmod 600"),
        (("--page", "nowhere.invalid:0", "--page-token-file", "open"), ""),
        (("--page", "web"), "want [HOST:]PORT"),
        (("--page-token-file", "open"), "without --page"),
        (("--record", "notes"), "is not a record that multiring wrote"),
        (("--record", "/proc/none/r"), "want a file that can be written"),
        (("--page", "0", "--hosts", "a:1", "--launcher", "mpiexec"), "mpiexec starts the ranks"),
        (("--record", "r", "--nodes", "2", "--node-rank", "1", "--meet", "a:1"), "node 0 has the job's record"),
    ):
        here = () if "--hosts" in words or "--nodes" in words else ("-n", "1")
        ended = subprocess.run(
            [sys.executable, "-m", "multiring", "run", *here, *words, *program],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        assert (ended.returncode, error in ended.stderr) == (2, True), (words, ended.stderr)
        assert "Traceback" not in ended.stderr
    taken.close()
    assert (tmp_path / "notes").read_text() == "notes"


@pytest.mark.parametrize("seed", range(3))
def test_a_record_is_whole_after_the_launcher_was_killed(
    watch: Callable[..., WatchedJob], tmp_path: Path, seed: int
) -> None:
    running = watch("-n", "2", "--page", "0", "--record", "r.jsonl")
    running.wait_for(has_steps)
    time.sleep(random.Random(seed).random())  # noqa: S311 -- a moment
    running.process.kill()
    running.process.wait()
    data = (tmp_path / "r.jsonl").read_bytes()
    whole = data.count(b"\n")
    assert len(list(read_record(data))) in (whole, whole + 1)
    until = time.monotonic() + LIMIT_S
    with contextlib.suppress(ConnectionError):  # the page ends with the launcher
        while time.monotonic() < until:
            running.ask("/")
    assert time.monotonic() < until
