"""Start `multiring vision serve` as a user does, and send it requests byte by byte."""

import http.client
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class RunningServer:
    """A server in a process of its own.

    Attributes:
        process: the process.
        port: its port on 127.0.0.1.
    """

    process: "subprocess.Popen[str]"
    port: int

    def ask(
        self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        """Send a request on a connection of its own; return status, headers and body."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=240)
        try:
            connection.request(method, path, body, dict(headers or {}))
            response = connection.getresponse()
            names = {name.lower(): value for name, value in response.getheaders()}
            return response.status, names, response.read()
        finally:
            connection.close()

    def send(self, data: bytes, seconds: float = 20) -> bytes:
        """Send bytes, and return what comes until the server closes the connection or `seconds` are over."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=seconds) as connection:
            found = b""
            try:
                connection.sendall(data)
                while chunk := connection.recv(1 << 16):
                    found += chunk
            except (TimeoutError, ConnectionError):
                pass
            return found

    def resident_bytes(self) -> int:
        """Return the memory of the server."""
        pages = Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]
        return int(pages) * 4096

    def end(self) -> str:
        """Send SIGTERM, wait, and return the rest of the output. The exit code must be 0."""
        self.process.send_signal(signal.SIGTERM)
        rest, _ = self.process.communicate(timeout=240)
        assert self.process.returncode == 0, rest
        return rest


@contextmanager
def running_server(*words: str | Path) -> Iterator[RunningServer]:
    """Start a server on a free port, and end it after the block."""
    command = [sys.executable, "-m", "multiring", "vision", "serve", *map(str, words), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    said = ""
    try:
        for line in process.stdout:
            said += line
            if found := re.fullmatch(r"http://127\.0\.0\.1:(\d+)\n", line):
                break
        else:
            raise AssertionError(said)
        yield RunningServer(process=process, port=int(found[1]))
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


class ClientLoad:
    """Clients in threads that each send one request after the other, until the server refuses connections.

    Attributes:
        seconds: the time of each answer.
        statuses: the statuses of the answers.
        lost: for each connection that had worked and broke within a request, how many answers it had got.
    """

    def __init__(
        self, port: int, path: str, body: bytes, headers: Mapping[str, str] | None = None, *, clients: int
    ) -> None:
        self._port, self._path, self._body, self._headers = port, path, body, dict(headers or {})
        self._is_over = threading.Event()
        self.seconds: list[float] = []
        self.statuses: set[int] = set()
        self.lost: list[int] = []
        self._threads = [threading.Thread(target=self._run) for _ in range(clients)]
        for each in self._threads:
            each.start()

    def stop(self) -> None:
        """End the clients, each after its next answer."""
        self._is_over.set()
        self.join()

    def join(self) -> None:
        """Wait until the clients have ended."""
        for each in self._threads:
            each.join(timeout=240)
            assert not each.is_alive()

    def _run(self) -> None:
        while not self._is_over.is_set():
            connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=240)
            try:
                connection.connect()
                if count := self._ask_often(connection):
                    self.lost.append(count)
            except ConnectionError:  # refused: the server takes no new connection
                return
            finally:
                connection.close()

    def _ask_often(self, connection: http.client.HTTPConnection) -> int:
        """Ask until the server says that it closes. Return how many answers came before the connection broke, or 0."""
        count = 0
        with suppress(ConnectionError, http.client.HTTPException):
            while not self._is_over.is_set():
                start = time.monotonic()
                connection.request("POST", self._path, self._body, self._headers)
                response = connection.getresponse()
                response.read()
                self.seconds.append(time.monotonic() - start)
                self.statuses.add(response.status)
                count += 1
                if response.getheader("connection") == "close":
                    return 0
            return 0
        return count
