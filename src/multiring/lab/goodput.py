"""Measure the goodput of plain sockets between a lab's hosts.

The goodput is the upper bound for the libraries' rates.
"""

import multiprocessing
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

from multiring.errors import LaunchError
from multiring.lab.machine import Lab
from multiring.lab.namespaces import NamespaceKind, inside

_CHUNK_BYTES = 1 << 18
_SHORTEST_S = 1e-3
_LATE_S = 10.0  # how long to wait for the last process to report after the end
_UP_S = 60.0  # how long the processes may take to start, on a busy machine


@dataclass(frozen=True, slots=True)
class Flow:
    """A stream of bytes from host `source` to host `target`, over one rail."""

    source: int
    target: int
    rail: int = 0


def goodput(lab: Lab, flows: Sequence[Flow], *, seconds: float = 5.0, drain_s: float = 1.0) -> list[float]:
    """Run all `flows` at the same time, and return their received bytes per second.

    A flow is one TCP connection, and each end is a process. Time starts when all processes run. Bytes that arrive in
    the first `drain_s` seconds do not count, because the token buckets are not empty yet.

    Raises:
        LaunchError: the processes did not start in time, or nothing arrived over a flow.
    """
    forks = multiprocessing.get_context("fork")  # forked processes inherit their sockets
    pipes: list[Connection] = []
    for flow in flows:
        for connected, run in zip(_connect(lab, flow), (_send, _receive), strict=True):
            ours, theirs = forks.Pipe()
            forks.Process(target=_run_when_told, args=(run, connected, theirs), daemon=True).start()
            connected.close()
            theirs.close()
            pipes.append(ours)
    latest = time.monotonic() + _UP_S
    late = sum(not pipe.poll(max(latest - time.monotonic(), 0.0)) for pipe in pipes)
    if late:
        raise LaunchError(f"{late} of {len(pipes)} processes that measure flows did not start in {_UP_S:.0f} s")
    begin = time.monotonic() + drain_s
    end = begin + seconds
    for pipe in pipes:
        pipe.recv()
        pipe.send((begin, end))
    return [_rate_of(flow, result, end + _LATE_S) for flow, result in zip(flows, pipes[1::2], strict=True)]


def _run_when_told(run: Callable[[socket.socket, float, float], float], own: socket.socket, pipe: Connection) -> None:
    """Report that this process runs, wait for begin and end from `pipe`, run one end of a flow, and send its rate.

    The times are sent after the start of all processes, because a busy machine may start a process late.
    """
    pipe.send("up")
    if pipe.poll(2 * _UP_S):
        begin_s, end_s = pipe.recv()
        pipe.send(run(own, begin_s, end_s))


def _connect(lab: Lab, flow: Flow) -> tuple[socket.socket, socket.socket]:
    """Return both ends of a connection.

    Any process can use the ends; each end stays in the namespace in which it was created.
    """
    with inside(lab.hosts[flow.target].network, NamespaceKind.NET), socket.socket() as listener:
        listener.bind((lab.plan.address(flow.target, flow.rail), 0))
        listener.listen()
        with inside(lab.hosts[flow.source].network, NamespaceKind.NET):
            source = socket.create_connection(listener.getsockname(), timeout=_LATE_S)
        listener.settimeout(_LATE_S)
        while True:
            target, caller = listener.accept()
            if caller == source.getsockname():
                return source, target
            target.close()  # the connection is from another process of this network


def _send(source: socket.socket, _begin: float, end: float) -> float:
    """Send as much as the connection takes until `end`. Return zero, because only the receiver measures the rate."""
    chunk = bytes(_CHUNK_BYTES)
    while (left_s := end - time.monotonic()) > 0:
        source.settimeout(max(left_s, _SHORTEST_S))
        try:
            source.send(chunk)
        except OSError:  # the time is over, or the other end has closed the connection
            break
    return 0.0


def _receive(target: socket.socket, begin: float, end: float) -> float:
    """Receive until `end`, and return the received bytes per second, counted from `begin`."""
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
    return counted / max(last_s - first_s, _SHORTEST_S)


def _rate_of(flow: Flow, result: Connection, latest: float) -> float:
    with result:
        if result.poll(max(latest - time.monotonic(), 0.0)) and (rate := float(result.recv())) > 0:
            return rate
    raise LaunchError(f"nothing arrived from host{flow.source} at host{flow.target} on rail{flow.rail}")
