"""munge's credentials, by the commands munge and unmunge. Both run as processes of their own.

A credential is encrypted with the cluster's key, and restricted to this user: no other user's process can decode it,
except root's, which can read the key. munge only seals texts. So rank 0 listens on one of a few ports that the step's
name determines, and the others look for it on the step's hosts. A rank sends a credential with a number that it has
just drawn; rank 0 answers with a credential that contains this number and the text. So whoever is between them learns
nothing, and can neither take rank 0's place nor replay an answer.
"""

import errno
import hashlib
import json
import os
import secrets
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

from multiring._exchanges.contract import ExchangeError, PlaceExchange

_PORTS = (20000, 32767)  # below the ports that kernels give out
_TRIED_PORTS = 8
_MOST_CALLERS = 64  # at a time
_TALK_S, _CONNECT_S, _COMMAND_S = 10.0, 1.0, 20.0
_MOST_BYTES = 1 << 20
_PAUSE_S = 0.2


class MungeExchange(PlaceExchange):
    """Rank 0 serves the text to this user's processes of the same step.

    Args:
        step: the step's name.
        hosts: the step's hosts.
        ports: the ports on which rank 0 may listen, both ends included; None uses some of 20000 to 32767.
    """

    name = "munge"

    def __init__(self, step: str, hosts: tuple[str, ...], ports: tuple[int, int] | None) -> None:
        super().__init__()
        self._step, self._hosts = step, hosts
        self._ports = list(_ports_of(step, ports or _PORTS))
        self._listener: socket.socket | None = None
        self._turn = 0

    def publish(self, text: str) -> bool:
        """Serve the text from a thread until `close`."""
        _decode(_encode(b"test"))  # before another rank relies on it
        refusals = []
        for port in self._ports:
            try:
                # At all addresses: the others know the hosts' names only, which may lead to another network than
                # MULTIRING_INTERFACE. Who is no rank gets no answer anywhere.
                self._listener = socket.create_server(("", port), backlog=1024)
            except OSError as error:
                refusals.append(f"{port}: {error.strerror}")
                continue
            threading.Thread(target=_serve, args=(self._listener, self._step, text), daemon=True).start()
            return False
        raise ExchangeError(f"rank 0 can listen on no port: {', '.join(refusals)}")

    def fetch(self, wait_s: float) -> str | None:
        """Ask each host of the step on each port."""
        if not self._hosts:
            raise ExchangeError("the step's hosts are not known (SLURM_STEP_NODELIST is not set)")
        _program("munge")
        latest = time.monotonic() + wait_s
        refusals: dict[str, str] = {}
        # The first host at every call, and one of the others: rank 0 is elsewhere only if the user has placed it there.
        for host in dict.fromkeys((self._hosts[0], self._hosts[self._turn % len(self._hosts)])):
            for port in self._ports:
                try:
                    with socket.create_connection((host, port), _CONNECT_S) as talk:
                        return self._ask(talk)
                except (OSError, ValueError, ExchangeError) as error:
                    refusals.setdefault(f"{getattr(error, 'strerror', None) or error}", f"{host}:{port}")
        self._turn += 1
        said = ", ".join(f"{place}: {text}" for text, place in refusals.items())
        self.waits_for = f"rank 0 answers on none of the ports {', '.join(map(str, self._ports))} ({said})"
        time.sleep(min(_PAUSE_S, max(latest - time.monotonic(), 0.0)))
        return None

    def close(self) -> None:
        """Stop to serve."""
        if self._listener is not None:
            with suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
            self._listener.close()
            self._listener = None

    def _ask(self, talk: socket.socket) -> str:
        """Raises OSError, ValueError or ExchangeError if the other end is not rank 0 of this step, or munge fails."""
        number = secrets.token_hex(16)
        talk.settimeout(_TALK_S)
        talk.sendall(_encode(json.dumps({"step": self._step, "number": number}).encode()))
        talk.shutdown(socket.SHUT_WR)
        answer = json.loads(_decode(_received(talk)))
        if answer["step"] != self._step or answer["number"] != number:
            raise ValueError("another step answers")
        if "text" not in answer:
            raise ValueError("it sends the question back")
        return str(answer["text"])


def _serve(listener: socket.socket, step: str, text: str) -> None:
    room = threading.Semaphore(_MOST_CALLERS)

    def answer(talk: socket.socket) -> None:
        # Whoever is not a rank of this step gets no answer.
        with room, talk, suppress(OSError, ValueError, KeyError, TypeError, ExchangeError):
            talk.settimeout(_TALK_S)
            asked = json.loads(_decode(_received(talk)))
            if asked["step"] == step:
                talk.sendall(_encode(json.dumps({"step": step, "number": asked["number"], "text": text}).encode()))

    while True:
        try:
            talk, _ = listener.accept()
        except OSError as error:
            if error.errno in (errno.EBADF, errno.EINVAL):  # `close` has closed it
                return
            time.sleep(_PAUSE_S)  # a caller has gone, or this process has no descriptor left at this moment
            continue
        threading.Thread(target=answer, args=(talk,), daemon=True).start()


def _received(talk: socket.socket) -> bytes:
    """Return all that the other end sends.

    Raises:
        ValueError: it is too much, or comes too slowly.
    """
    latest = time.monotonic() + _TALK_S
    data = b""
    while part := talk.recv(1 << 16):
        data += part
        if len(data) > _MOST_BYTES or time.monotonic() > latest:
            raise ValueError("too long")
    return data


def _encode(data: bytes) -> bytes:
    """Return a credential that only this user can decode."""
    return _run("munge", f"--restrict-uid={os.getuid()}", "--cipher=aes128", data=data)[0]


def _decode(credential: bytes) -> bytes:
    """Return what a credential of this user contains."""
    said, data = _run("unmunge", "--keys=UID", "--numeric", "--metadata=/dev/stderr", data=credential)[::-1]
    words = said.decode(errors="replace").split()
    if words != ["UID:", str(os.getuid())]:
        raise ExchangeError(f"a credential of another user: {' '.join(words)[:100]!r}")
    return data


def _run(*command: str, data: bytes) -> tuple[bytes, bytes]:
    program = _program(command[0])
    try:
        # The texts travel through pipes: nobody sees them in /proc.
        done = subprocess.run(  # noqa: S603 -- munge's own commands
            (program, *command[1:]), input=data, capture_output=True, timeout=_COMMAND_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ExchangeError(f"{command[0]}: {error}") from None
    if done.returncode != 0:
        raise ExchangeError(done.stderr.decode(errors="replace").strip() or f"{command[0]} fails: {done.returncode}")
    return done.stdout, done.stderr


def _program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise ExchangeError(f"no program {name} here")
    return found


def _ports_of(step: str, ports: tuple[int, int]) -> Iterator[int]:
    """Return a few ports of a range, which the step's name determines."""
    first, last = max(ports[0], 1), ports[1]
    count = last - first + 1
    start = int.from_bytes(hashlib.sha256(step.encode()).digest()[:8], "big")
    return (first + (start + each) % count for each in range(min(_TRIED_PORTS, count)))
