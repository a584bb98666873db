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

from multiring._exchanges.background_call import BackgroundCall
from multiring._exchanges.contract import ExchangeError, PlaceExchange
from multiring._limits.processes import start_thread

_PORTS = (20000, 32767)  # below the ports that kernels give out
_TRIED_PORTS = 8
_MOST_CALLERS = 64  # at a time
_TALK_S, _CONNECT_S, _COMMAND_S = 10.0, 1.0, 20.0
_ROUND_S = 12.0  # for all places of one round; the next round goes on where this one has stopped
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
        self._next = 0  # the place with which the next round begins
        self._asking: BackgroundCall[str | None] | None = None

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
            told = self._listener, self._step, text
            serving = threading.Thread(target=_serve, args=told, daemon=True, name="multiring munge")
            start_thread(serving, "rank 0 cannot start a thread, by which it tells the other ranks where to meet")
            return False
        raise ExchangeError(f"rank 0 can listen on no port: {', '.join(refusals)}")

    def fetch(self, wait_s: float) -> str | None:
        """Ask each host of the step on each port."""
        if not self._hosts:
            raise ExchangeError("the step's hosts are not known (SLURM_STEP_NODELIST is not set)")
        _program("munge")
        latest = time.monotonic() + wait_s
        # In a thread: names, commands and other listeners may keep a round waiting.
        if self._asking is None:
            self._asking = BackgroundCall(self._ask_all)
        if not self._asking.is_over(wait_s):
            return None
        text, self._asking = self._asking.result(), None
        if text is None:
            time.sleep(min(_PAUSE_S, max(latest - time.monotonic(), 0.0)))
        return text

    def close(self) -> None:
        """Stop to serve."""
        if self._listener is not None:
            with suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
            self._listener.close()
            self._listener = None

    def _ask_all(self) -> str | None:
        latest = time.monotonic() + _ROUND_S
        refusals: dict[str, str] = {}
        places = []
        # The first host in every round, and one of the others: rank 0 is elsewhere only if the user has placed it so.
        for host in dict.fromkeys((self._hosts[0], self._hosts[self._turn % len(self._hosts)])):
            try:
                addresses = dict.fromkeys(str(each[4][0]) for each in socket.getaddrinfo(host, 0))
            except OSError as error:
                refusals.setdefault(str(error.strerror or error), host)
                continue
            places += [(host, address, port) for address in addresses for port in self._ports]
        self._turn += 1
        # A listener that uses up the time must not keep this rank from the places after it for ever.
        first, self._next = self._next % max(len(places), 1), 0
        for number, (host, address, port) in enumerate((*places[first:], *places[:first])):
            if time.monotonic() > latest:
                self._next = first + number
                break
            try:
                with socket.create_connection((address, port), _CONNECT_S) as talk:
                    return self._ask(talk, min(time.monotonic() + _TALK_S, latest))
            except (OSError, ValueError, ExchangeError) as error:
                refusals.setdefault(f"{getattr(error, 'strerror', None) or error}", f"{host}:{port}")
        said = ", ".join(f"{place}: {text}" for text, place in refusals.items())
        self.waits_for = f"rank 0 answers on none of the ports {', '.join(map(str, self._ports))} ({said})"
        return None

    def _ask(self, talk: socket.socket, latest: float) -> str:
        """Raises OSError, ValueError or ExchangeError if the other end is not rank 0 of this step, or munge fails."""
        number = secrets.token_hex(16)
        question = _encode(json.dumps({"step": self._step, "number": number}).encode())
        talk.settimeout(_left(latest))
        talk.sendall(question)
        talk.shutdown(socket.SHUT_WR)
        answer = json.loads(_decode(_received(talk, latest)))
        if answer["step"] != self._step or answer["number"] != number:
            raise ValueError("another step answers")
        if "text" not in answer:
            raise ValueError("it sends the question back")
        return str(answer["text"])


def _serve(listener: socket.socket, step: str, text: str) -> None:
    room = threading.Semaphore(_MOST_CALLERS)

    def answer(talk: socket.socket, came_s: float) -> None:
        # Whoever is not a rank of this step gets no answer.
        with room, talk, suppress(OSError, ValueError, KeyError, TypeError, ExchangeError):
            # A rank that has waited this long has gone, and asks again. Decoding its old question would keep the others
            # waiting until they go, too (benchmarks/results/munge_callers_2core_202611.md).
            if time.monotonic() - came_s > _TALK_S:
                return
            asked = json.loads(_decode(_received(talk, time.monotonic() + _TALK_S)))
            talk.settimeout(_TALK_S)
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
        try:
            came = talk, time.monotonic()
            threading.Thread(target=answer, args=came, daemon=True, name="multiring munge").start()
        except RuntimeError:  # the kernel refuses a thread at this moment; the rank asks again
            talk.close()
            time.sleep(_PAUSE_S)


def _received(talk: socket.socket, latest: float) -> bytes:
    """Return all that the other end sends before the time `latest`, by time.monotonic().

    Raises:
        OSError: the connection is lost, or the other end has not finished in time.
        ValueError: it is too much.
    """
    data = b""
    talk.settimeout(_left(latest))
    while part := talk.recv(1 << 16):
        data += part
        if len(data) > _MOST_BYTES:
            raise ValueError("too long")
        talk.settimeout(_left(latest))
    return data


def _left(latest: float) -> float:
    left_s = latest - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("timed out")
    return left_s


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
