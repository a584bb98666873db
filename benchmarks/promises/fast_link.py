"""Measure sums between two ranks over loopback TCP with 1, 2, 4 and 8 connections, Gloo, and plain sockets by turns.

    python benchmarks/promises/fast_link.py [--connections 1,2,4,8] [--mib 64,256] [--seconds 45] [--seal]
    python benchmarks/promises/fast_link.py --connections 1 --mib 64 --link 20gbit

Two ranks sum arrays over one rail of this host as if they were two hosts. All programs are started once and then
measured by turns, until the time is up. Plain sockets move the bytes of such a sum in both directions at the same time.
"sockets" adds nothing, and "adding" adds once what arrives. With --link (as root), all of them use a loopback of that
rate, which both directions share, by a token bucket in a network namespace of its own. The exit code is 1 if a sum was
wrong.
"""

import argparse
import json
import os
import secrets
import socket
import statistics
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # lets this script import from the repository root

import numpy as np
from benchmarks.evidence.support.claims import commit, machine

from multiring._settings import environment_of, inherited_environment

HOST = "127.0.0.1"
GB = 1e9
PLAIN = ("sockets", "adding")
OTHERS = ("gloo", *PLAIN)
PIECE_BYTES = 1 << 20  # of the calls of plain sockets
TURN_BYTES = 512 << 20  # that a rank sends in a turn


# ---- the ranks -----------------------------------------------------------------------------


class Sums:
    """Sums of arrays by multiring."""

    def __init__(self, rank: int, port: int) -> None:
        """Join the job; the environment names it."""
        import multiring  # noqa: PLC0415 -- the other kinds must not load it

        del rank, port
        self._group = multiring.init()

    def add(self, array: np.ndarray) -> None:
        """Sum `array` over the ranks, in place."""
        self._group.all_reduce(array)

    def meet(self) -> None:
        """Wait for the other rank."""
        self._group.barrier()


class GlooSums:
    """Sums of arrays by Gloo of torch."""

    def __init__(self, rank: int, port: int) -> None:
        """Join at `port`."""
        import torch  # noqa: PLC0415 -- the other kinds must not load it
        import torch.distributed as dist  # noqa: PLC0415

        self._torch, self._dist = torch, dist
        dist.init_process_group("gloo", init_method=f"tcp://{HOST}:{port}", rank=rank, world_size=2)

    def add(self, array: np.ndarray) -> None:
        """Sum `array` over the ranks, in place."""
        self._dist.all_reduce(self._torch.from_numpy(array))

    def meet(self) -> None:
        """Wait for the other rank."""
        self._dist.barrier()


class Sockets:
    """Bytes in both directions over one plain connection."""

    def __init__(self, rank: int, port: int) -> None:
        """Connect at `port`."""
        if rank == 0:
            with socket.create_server((HOST, port)) as server:
                self._line, _ = server.accept()
        else:
            self._line = _called(port)
        self._line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def add(self, array: np.ndarray) -> None:
        """Send `array` and receive as many bytes, at the same time."""
        out = array.view(np.uint8).data
        into = bytearray(PIECE_BYTES)
        sender = threading.Thread(target=self._line.sendall, args=(out,))
        sender.start()
        left = len(out)
        while left > 0:
            left -= self._line.recv_into(into, min(left, PIECE_BYTES))
        sender.join()

    def meet(self) -> None:
        """Wait for the other rank."""
        self._line.sendall(b"m")
        self._line.recv(1)


class AddingSockets(Sockets):
    """The same, and what arrives is added to an array once."""

    def add(self, array: np.ndarray) -> None:
        """Send `array`, receive as many bytes at the same time, and add them to another array."""
        out = array.view(np.uint8).data
        if len(getattr(self, "_total", ())) != len(array):
            self._total = np.zeros_like(array)
        into = np.empty(PIECE_BYTES // 4, np.float32)
        memory = into.view(np.uint8).data
        sender = threading.Thread(target=self._line.sendall, args=(out,))
        sender.start()
        done, size = 0, len(out)
        while done < size:
            wanted, got = min(PIECE_BYTES, size - done), 0
            while got < wanted:
                got += self._line.recv_into(memory[got:wanted])
            here = slice(done // 4, (done + wanted) // 4)
            np.add(self._total[here], into[: wanted // 4], out=self._total[here])
            done += wanted
        sender.join()


def _called(port: int) -> socket.socket:
    for _ in range(600):
        with suppress(ConnectionRefusedError):
            return socket.create_connection((HOST, port))
        time.sleep(0.05)
    raise SystemExit(f"nobody listens at port {port}")


def rank_of(kind: str, rank: int, port: int) -> None:
    """Verify a sum, then measure a turn for each line of standard input: the size of the arrays in MiB."""
    sums: Any = {"gloo": GlooSums, "sockets": Sockets, "adding": AddingSockets}.get(kind, Sums)(rank, port)
    if kind not in PLAIN:
        for count in (5, 3_000_001):
            array = np.arange(count, dtype=np.float32) % 1000 + rank
            sums.add(array)
            if not bool((array == np.arange(count, dtype=np.float32) % 1000 * 2 + 1).all()):
                raise SystemExit(f"{kind}: rank {rank} got a wrong sum of {count} elements")
    arrays: dict[int, np.ndarray] = {}
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        mib = int(line)
        if mib not in arrays:
            arrays[mib] = np.full(mib << 18, 0, np.float32)
            sums.add(arrays[mib])  # plans, connects, and maps the memory
        times = max(1, TURN_BYTES // (mib << 20))
        sums.meet()
        cpu_s, wall_s = time.process_time(), time.monotonic()
        for _ in range(times):
            sums.add(arrays[mib])
        wall_s, cpu_s = time.monotonic() - wall_s, time.process_time() - cpu_s
        print(json.dumps({"gb": times * (mib << 20) / GB, "wall_s": wall_s, "cpu_s": cpu_s}), flush=True)


# ---- the measurement -----------------------------------------------------------------------


@dataclass
class Pair:
    """The two ranks of one kind, and what was measured by size in MiB."""

    kind: str
    ranks: list[subprocess.Popen[str]] = field(default_factory=list)
    rates: dict[int, list[float]] = field(default_factory=dict)
    costs: dict[int, list[float]] = field(default_factory=dict)

    def start(self, *, seal: bool) -> None:
        """Start the ranks; `turn` may follow once they are ready."""
        port = _free_port()
        for rank in range(2):
            own = {"GLOO_SOCKET_IFNAME": "lo"}
            if self.kind not in OTHERS:
                own = environment_of(
                    rank=rank, size=2, rendezvous=f"{HOST}:{port}", engine="tcp", rails=HOST, seal=int(seal),
                    connections=int(self.kind), secret=SECRET, job=f"fast-link-{self.kind}",
                )  # fmt: skip
            self.ranks.append(
                subprocess.Popen(  # noqa: S603
                    [sys.executable, __file__, "--rank", str(rank), "--kind", self.kind, "--port", str(port)],
                    env={**inherited_environment(), **own},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )

    def hear(self) -> list[dict[str, Any]]:
        """Return what each rank says next."""
        lines = [rank.stdout.readline() for rank in self.ranks if rank.stdout is not None]
        if not all(lines):
            raise SystemExit(f"a rank of {self.kind} ended")
        return [json.loads(line) for line in lines]

    def turn(self, mib: int, *, counts: bool) -> None:
        """Measure once."""
        for rank in self.ranks:
            assert rank.stdin is not None
            print(mib, file=rank.stdin, flush=True)
        told = self.hear()
        if counts:
            wall_s = max(each["wall_s"] for each in told)
            self.rates.setdefault(mib, []).append(told[0]["gb"] / wall_s)
            self.costs.setdefault(mib, []).append(statistics.mean(each["cpu_s"] / each["gb"] for each in told))

    def end(self) -> int:
        """End the ranks; return how many failed."""
        for rank in self.ranks:
            if rank.stdin is not None:
                rank.stdin.close()
        return sum(rank.wait(timeout=60) != 0 for rank in self.ranks)


SECRET = secrets.token_hex(16)


def _free_port() -> int:
    with socket.create_server((HOST, 0)) as server:
        return int(server.getsockname()[1])


def _interval(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} [{min(values):.2f}, {max(values):.2f}]"


def _table(pairs: list[Pair], sizes: list[int]) -> None:
    columns = "times one connection | times Gloo | times sockets | CPU, times adding sockets"
    print(f"| library | MiB | GB/s of a rank | CPU s/GB and rank | {columns} |")
    print("|---|---|---|---|---|---|---|---|")
    by_kind = {pair.kind: pair for pair in pairs}
    for mib in sizes:
        for pair in pairs:
            rates = pair.rates.get(mib, [])
            if not rates:
                continue
            ratios = []
            for other in ("1", "gloo", "sockets"):
                beside = by_kind[other].rates.get(mib, []) if other in by_kind else []
                each = [mine / theirs for mine, theirs in zip(rates, beside, strict=False)]
                ratios.append(_interval(each) if each else "")
            beside = by_kind["adding"].costs.get(mib, []) if "adding" in by_kind else []
            costs = [mine / theirs for mine, theirs in zip(pair.costs[mib], beside, strict=False)]
            ratios.append(_interval(costs) if costs else "")
            name = pair.kind if pair.kind in OTHERS else f"multiring, {pair.kind} connections"
            print(f"| {name} | {mib} | {_interval(rates)} | {_interval(pair.costs[mib])} | {' | '.join(ratios)} |")


def main() -> int:
    """Measure by turns and print a table; return 1 if a rank failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--connections", default="1,2,4,8", help="numbers of connections")
    parser.add_argument("--mib", default="64,256", help="sizes of the arrays")
    parser.add_argument("--seconds", type=float, default=45, help="time for everything; at least one turn is measured")
    parser.add_argument("--seal", action="store_true", help="seal multiring's connections")
    parser.add_argument("--without", default="", help="kinds to leave out: gloo, sockets, adding")
    parser.add_argument("--link", metavar="RATE", help="rate of the loopback that all share, such as 10gbit; as root")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)  # the network namespace
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--kind", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        rank_of(arguments.kind, arguments.rank, arguments.port)
        return 0
    if arguments.link and not arguments.inside:
        script = f"ip link set lo up && tc qdisc replace dev lo root tbf rate {arguments.link} burst 4mb latency 20ms"
        command = [
            "unshare",
            "--net",
            "sh",
            "-c",
            f'{script} && exec "$@"',
            "sh",
            sys.executable,
            *sys.argv,
            "--inside",
        ]
        return subprocess.run(command, check=False).returncode  # noqa: S603 -- our own
    began = time.monotonic()
    others = [kind for kind in OTHERS if kind not in arguments.without.split(",")]
    sizes = [int(mib) for mib in arguments.mib.split(",")]
    print(f"# Several connections on a fast link, {time.strftime('%Y-%m-%d %H:%M')}\n")
    print(f"`{' '.join(['python', *sys.argv])}` at commit {commit()}, {machine()}, {os.cpu_count()} cores,")
    print(f"load {os.getloadavg()[0]:.1f}\n", flush=True)
    pairs = [Pair(kind) for kind in (*arguments.connections.split(","), *others)]
    for pair in pairs:
        pair.start(seal=arguments.seal)
    for pair in pairs:
        pair.hear()
    turns, longest_s = 0, 0.0
    for mib in sizes:
        for pair in pairs:
            pair.turn(mib, counts=False)
    while turns == 0 or time.monotonic() - began + longest_s < arguments.seconds:
        start = time.monotonic()
        for mib in sizes:
            for pair in pairs:
                pair.turn(mib, counts=True)
        longest_s = max(longest_s, time.monotonic() - start)
        turns += 1
    _table(pairs, sizes)
    print(f"\n{turns} turns, {time.monotonic() - began:.0f} s; medians, least and most in brackets")
    failed = sum(pair.end() for pair in pairs)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
