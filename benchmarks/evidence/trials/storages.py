"""Studies in SQLite and PostgreSQL: optuna-dashboard opens them live, and a storage that goes away gets all later."""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.evidence.support.claims import Claim

RANK = Path(__file__).resolve().with_name("rank.py")
_BINARIES = Path("/usr/lib/postgresql")  # Debian's place
_WAIT_S = 120.0


def storages(count: int, load: Callable[[], str]) -> Iterator[Claim]:
    """Run a study of `count` trials in each kind of storage."""
    for kind in ("SQLite", "PostgreSQL"):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            folder.chmod(0o755)
            with database(folder) if kind == "PostgreSQL" else contextlib.nullcontext() as found:
                yield one(kind, count, folder, found, load)


def one(kind: str, count: int, folder: Path, found: "Database | None", load: Callable[[], str]) -> Claim:
    """Run a study; ask optuna-dashboard meanwhile; stop PostgreSQL for some seconds."""
    url = f"sqlite:///{folder}/study.db" if found is None else found.url
    log = (folder / "log").open("w")
    words = [sys.executable, "-m", "multiring", "run", "-n", "2", str(RANK), "stored", str(folder / "result.json")]
    job = subprocess.Popen([*words, json.dumps([count, url])], stdout=log, stderr=log)  # noqa: S603 -- our own program
    port = free_port()
    page = subprocess.Popen(["optuna-dashboard", "--port", str(port), url], stdout=log, stderr=log)  # noqa: S603, S607
    seen: list[str] = []
    try:
        until_s = time.monotonic() + _WAIT_S
        while "Running" not in seen and job.poll() is None and time.monotonic() < until_s:
            time.sleep(0.5)
            with contextlib.suppress(OSError, LookupError):
                seen = states_shown(port)
        if found is not None:
            found.stop()
            time.sleep(5.0)
            found.start()
        code = job.wait(_WAIT_S + count)
        shown: list[str] = []
        while not shown and time.monotonic() < until_s + _WAIT_S + count:
            with contextlib.suppress(OSError, LookupError):
                shown = states_shown(port)
    finally:
        page.kill()
        page.wait()
    result = json.loads((folder / "result.json").read_text()) if code == 0 else {"unsaved": count, "warnings": []}
    is_whole = shown.count("Complete") == count and result["unsaved"] == 0
    away = "; PostgreSQL was stopped for 5 s meanwhile" if found is not None else ""
    return Claim(
        text=f"{kind}: optuna-dashboard shows a study while it runs, and all {count} trials at its end{away}",
        figure=f"{seen.count('Complete')} trials complete and {seen.count('Running')} running when it was asked; "
        f"{shown.count('Complete')} at the end; {result['unsaved']} unsaved; the storage was reported as lost "
        f"{result['warnings']} times; exit code {code}; {load()}",
        holds=is_whole and "Running" in seen and result["warnings"] == (found is not None),
    )


def states_shown(port: int) -> list[str]:
    """Return the states of all trials that optuna-dashboard shows."""
    [study] = asked(port, "studies")["study_summaries"]
    return [each["state"] for each in asked(port, f"studies/{study['study_id']}?after=0")["trials"]]


def asked(port: int, path: str) -> Any:
    """Return an answer of the dashboard."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/{path}", timeout=20) as answer:
        return json.loads(answer.read())


def free_port() -> int:
    """Return a port that nobody listens at."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class Database:
    """A PostgreSQL of its own, run by the user postgres."""

    def __init__(self, folder: Path) -> None:
        self._place, self._port = folder / "postgres", free_port()
        self._place.mkdir()
        shutil.chown(self._place, "postgres")
        self._binaries = max(_BINARIES.iterdir()) / "bin"
        self._run("initdb", "-A", "trust")
        self.url = f"postgresql+pg8000://postgres@127.0.0.1:{self._port}/postgres"

    def start(self) -> None:
        """Start it, and wait until it answers."""
        self._run("pg_ctl", "-w", "-l", f"{self._place}/log", "-o", f"-p {self._port} -k {self._place}", "start")

    def stop(self) -> None:
        """Stop it as a power failure does."""
        self._run("pg_ctl", "-w", "-m", "immediate", "stop")

    def _run(self, program: str, *words: str) -> None:
        path = self._binaries / program
        command = ["runuser", "-u", "postgres", "--", str(path), "-D", f"{self._place}/data", *words]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=_WAIT_S, cwd="/")  # noqa: S603


@contextlib.contextmanager
def database(folder: Path) -> Iterator[Database]:
    """Run a PostgreSQL in the block."""
    if os.geteuid() != 0 or not _BINARIES.exists():
        raise SystemExit("storages: want root, and PostgreSQL of Debian; apt-get install postgresql")
    found = Database(folder)
    found.start()
    try:
        yield found
    finally:
        found.stop()
