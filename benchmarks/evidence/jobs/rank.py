"""Run one rank of a job for the evidence.

    python rank.py FOLDER TASK ...

The rank needs only NumPy. It sends its reports as JSON to the socket FOLDER/words. The parent process gives it signals
by creating files in FOLDER.
"""

import contextlib
import hashlib
import importlib
import json
import os
import select
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from tests.support.cases import check_reduced, operand
from tests.support.strangers import listening_port

import multiring
from multiring._settings import Settings

FOREVER_S = 60.0


def main() -> None:
    """Run the task of the command line."""
    folder, task, *arguments = sys.argv[1:]
    tasks: dict[str, Any] = {"die": die, "join": join, "sums": sums, "open": stay_open, "crowded": crowded}
    tasks[task](Path(folder), *arguments)


def tell(folder: Path, **word: Any) -> None:
    """Send a report to the parent process."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line:
        line.connect(f"{folder}/words")
        line.send(json.dumps(word).encode())


def die(folder: Path, stage: str, victim: str, workers: str) -> None:
    """Report from `stage`, where the parent kills the victim, and try to continue."""
    rank = Settings.from_environment().rank
    here = {"rank": rank, "pid": os.getpid(), "stage": stage}
    if stage == "init" and rank == int(victim):
        tell(folder, **here)
    group = multiring.init()
    for _ in range(int(workers)):
        if os.fork() == 0:  # imitates a data loader's worker
            time.sleep(FOREVER_S)
            os._exit(0)
    array = group.allocate(300_000, "float32")
    array[...] = 1
    group.all_reduce(array)
    if group.rank == int(victim) and stage != "init":
        tell(folder, **here)
    if stage == "shutdown":
        multiring.shutdown()
        time.sleep(0.5)
        return
    until = time.monotonic() + FOREVER_S
    while time.monotonic() < until:
        if stage == "barrier":
            group.barrier()
        else:
            group.all_reduce(array, "average")


def join(folder: Path) -> None:
    """Join and sum; report the time of joining and the number of open descriptors."""
    group = multiring.init()
    joined_s = time.monotonic()
    total = np.full(1000, group.rank + 1, np.int64)
    group.all_reduce(total)
    opened = len(list(Path("/proc/self/fd").iterdir()))
    group.barrier()
    right = bool((total == group.size * (group.size + 1) // 2).all())
    tell(folder, rank=group.rank, joined_s=joined_s, right=right, descriptors=opened, grid=group.grid)


def sums(folder: Path, cases: str) -> None:
    """Sum random float32 and bfloat16 arrays and compare with the oracle.

    The report has a digest of all bits.
    """
    group = multiring.init()
    digest = hashlib.blake2b(digest_size=16)
    sizes = np.random.default_rng(0).integers(1, 100_000, int(cases))
    for number, count in enumerate(sizes.tolist()):
        dtype, op = ("float32", "bfloat16")[number % 2], ("sum", "average")[number // 2 % 2]
        operands = [operand(dtype, op, (count,), (number, rank)) for rank in range(group.size)]
        array = group.allocate(count, dtype) if number % 3 else np.empty_like(operands[0])
        array[...] = operands[group.rank]
        group.all_reduce(array, op)
        check_reduced(array, operands, op, len(group.grid), f"case {number}")
        digest.update(array.tobytes())
    tell(folder, rank=group.rank, cases=len(sizes), digest=digest.hexdigest())


def stay_open(folder: Path) -> None:
    """Report the listening port, sum until the parent says stop, and check all sums."""
    group = multiring.init()
    tell(folder, rank=group.rank, port=listening_port())
    total, turns, going = np.ones(10_000), 0, np.ones(1)
    while going[0]:
        group.all_reduce(total, "average")
        going[0] = not (folder / "stop").exists()
        group.all_reduce(going, "max")
        turns += 1
    group.all_reduce(total)
    tell(folder, rank=group.rank, turns=turns, right=bool((total == group.size).all()))


def crowded(folder: Path, hosts: str, held: str) -> None:
    """Connect to all ranks while foreign connections occupy this rank's port.

    The ranks are on `hosts` virtual hosts. There are `held` foreign connections.
    """
    settings = Settings.from_environment()
    assert settings.rank is not None
    assert settings.size is not None
    host = settings.rank // (settings.size // int(hosts))
    # a function of the package has the same name, so the module is imported by its path
    world = importlib.import_module("multiring._runtime.job.joining")
    vars(world)["host_id"] = lambda: f"host {host}"
    door = CrowdedDoor(int(held))
    start = time.monotonic()
    group = multiring.init()
    door.wait_until_full()
    group.barrier()
    others = [rank for rank in range(group.size) if rank != group.rank]
    heard = {rank: np.zeros(1) for rank in others}
    handles = [group.recv_async(heard[rank], rank) for rank in others]
    handles += [group.send_async(np.full(1, float(group.rank)), rank) for rank in others]
    for handle in handles:
        handle.wait()
    links_s = time.monotonic() - start
    total = np.ones(10_000)
    group.all_reduce(total)
    right = bool((total == group.size).all()) and all(heard[rank][0] == rank for rank in others)
    group.barrier()
    tell(folder, rank=group.rank, right=right, links_s=links_s, came=door.came)
    door.close()


class CrowdedDoor:
    """Holds silent connections to this process's port, from when it listens.

    A connection that is closed is replaced.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._lines: dict[int, socket.socket] = {}
        self._closing = threading.Event()
        self.came = 0  # the number of connections so far
        self._thread = threading.Thread(target=self._hold, daemon=True)
        self._thread.start()

    def wait_until_full(self) -> None:
        """Wait until the wanted number of connections is open."""
        while len(self._lines) < self._count:
            time.sleep(0.01)

    def close(self) -> None:
        """Close all connections."""
        self._closing.set()
        self._thread.join()
        for line in self._lines.values():
            line.close()

    def _hold(self) -> None:
        port = 0
        while not port and not self._closing.wait(0.005):
            with contextlib.suppress(AssertionError):
                port = listening_port()
        gone = select.poll()
        while not self._closing.is_set():
            while len(self._lines) < self._count:
                line = socket.create_connection(("127.0.0.1", port))
                self._lines[line.fileno()] = line
                self.came += 1
                gone.register(line, select.POLLIN)
            for number, _ in gone.poll(50):
                gone.unregister(number)
                self._lines.pop(number).close()


if __name__ == "__main__":
    main()
