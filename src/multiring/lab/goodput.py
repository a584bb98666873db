"""What a lab's wires really carry: plain sockets between its hosts, the bound that other figures are shares of."""

import multiprocessing
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

from multiring.errors import LaunchError
from multiring.lab.machine import Lab
from multiring.lab.namespaces import Space, inside

_CHUNK_BYTES = 1 << 18
_SHORTEST_S = 1e-3
_LATE_S = 10.0  # how long after the end the last process may report


@dataclass(frozen=True, slots=True)
class Flow:
    """Bytes from one host to another, over one rail."""

    source: int
    target: int
    rail: int = 0


def goodput(lab: Lab, flows: Sequence[Flow], *, seconds: float = 5.0, drain_s: float = 1.0) -> list[float]:
    """Return the bytes per second that arrive for each of `flows`, all of them at the same time.

    One TCP connection a flow, each end a process of its own. What arrives in the first `drain_s` seconds, while
    the token buckets are not yet empty, does not count.

    Raises:
        LaunchError: a flow came to nothing.
    """
    forks = multiprocessing.get_context("fork")  # so that the ends inherit their sockets
    begin = time.monotonic() + drain_s
    end = begin + seconds
    results: list[Connection] = []
    for flow in flows:
        source, target = _connect(lab, flow)
        result, reporting = forks.Pipe(duplex=False)
        forks.Process(target=_send, args=(source, end), daemon=True).start()
        forks.Process(target=_receive, args=(target, begin, end, reporting), daemon=True).start()
        for inherited in (source, target, reporting):
            inherited.close()
        results.append(result)
    return [_rate_of(flow, result, end + _LATE_S) for flow, result in zip(flows, results, strict=True)]


def _connect(lab: Lab, flow: Flow) -> tuple[socket.socket, socket.socket]:
    """Return both ends of a connection; a socket stays in the namespace it was made in, whoever uses it."""
    with inside(lab.hosts[flow.target].network, Space.NET), socket.socket() as listener:
        listener.bind((lab.plan.address(flow.target, flow.rail), 0))
        listener.listen()
        with inside(lab.hosts[flow.source].network, Space.NET):
            source = socket.create_connection(listener.getsockname(), timeout=_LATE_S)
        listener.settimeout(_LATE_S)
        while True:
            target, caller = listener.accept()
            if caller == source.getsockname():
                return source, target
            target.close()  # a stranger of the same network


def _send(source: socket.socket, end: float) -> None:
    chunk = bytes(_CHUNK_BYTES)
    while (left_s := end - time.monotonic()) > 0:
        source.settimeout(max(left_s, _SHORTEST_S))
        try:
            source.send(chunk)
        except OSError:  # the time is over, or the other end says so
            return


def _receive(target: socket.socket, begin: float, end: float, reporting: Connection) -> None:
    buffer = bytearray(_CHUNK_BYTES)
    counted, first_s, last_s = 0, begin, begin
    while (left_s := end - time.monotonic()) > 0:
        target.settimeout(max(left_s, _SHORTEST_S))
        try:
            count = target.recv_into(buffer)
        except OSError:
            break
        if not count:
            break
        last_s = time.monotonic()
        if last_s < begin:
            first_s = last_s
        else:
            counted += count
    reporting.send(counted / max(last_s - first_s, _SHORTEST_S))


def _rate_of(flow: Flow, result: Connection, latest: float) -> float:
    with result:
        if result.poll(max(latest - time.monotonic(), 0.0)) and (rate := float(result.recv())) > 0:
            return rate
    raise LaunchError(f"nothing arrived from host{flow.source} at host{flow.target} on rail{flow.rail}")
