"""Odd programs for the ranks of a cluster. Each must end in bounded time, in clear words, and leave nothing.

Usage: `python -m tests.support.cluster_attacks dask|ray|spark ADDRESS [FOLDER]`. Without FOLDER the driver runs every
odd program, each in a job of two ranks, and prints a report of each. With FOLDER it starts two ranks that wait for
ever, writes its process ID to FOLDER/driver, and waits to be killed.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from tests.support.cluster_drivers import report

import multiring
from multiring.errors import CollectiveError

Run = Callable[..., list[Any]]
_LARGE = 1_000_000
_VERY_LARGE = 30_000_000  # 240 MB
# How rank 1 may end -> what the driver's error must say, in one of these ways.
ODD = {
    "two words": ("TwoWordsError: salt and pepper",),
    "locked": ("LockedError: locked",),
    "exit": ("SystemExit: 0",),
    "interrupt": ("KeyboardInterrupt",),
    "hard exit": ("exit code 0 and without a result", "rank 1 ended without a result"),
    "lock": ("TypeError: cannot pickle",),
    "refused here": ("cannot be unpickled here: LookupError: only the worker has it",),
    "killed before meeting": ("rank 1 was killed by SIGKILL", "rank 1 ended without a result"),
    "killed while returning": ("rank 1 was killed by SIGKILL", "rank 1 ended without a result"),
    "killed in an elastic job": ("rank 1 was killed by SIGKILL", "rank 1 ended without a result"),
    "error beside a large result": ("ZeroDivisionError: rank 1 divides",),
}


class TwoWordsError(Exception):
    """Can be pickled, but not unpickled."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


class LockedError(Exception):
    """Cannot be pickled."""

    def __init__(self) -> None:
        super().__init__("locked")
        self.lock = threading.Lock()


class _Refusing:
    """Cannot be unpickled on the driver, like what only a worker has."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _refuse, ()


class _Deadly:
    """Kills the process that pickles it: a rank that returns it dies while it returns."""

    def __reduce__(self) -> str:
        os.kill(os.getpid(), signal.SIGKILL)
        return ""


def _refuse() -> None:
    raise LookupError("only the worker has it")


def _raise(error: BaseException) -> None:
    raise error


_ENDS: dict[str, Callable[[], Any]] = {
    "two words": lambda: _raise(TwoWordsError("salt", "pepper")),
    "locked": lambda: _raise(LockedError()),
    "exit": lambda: sys.exit(0),
    "interrupt": lambda: _raise(KeyboardInterrupt()),
    "hard exit": lambda: os._exit(0),
    "lock": threading.Lock,
    "refused here": _Refusing,
    "killed while returning": _Deadly,
    "error beside a large result": lambda: _raise(ZeroDivisionError("rank 1 divides")),
}


def end_oddly(kind: str) -> Any:
    """End rank 1 in an odd way. The other rank waits in a collective, unless rank 1 returns."""
    if kind == "killed in an elastic job":
        return train_elastically(killed=1)
    if kind == "killed before meeting" and os.environ["MULTIRING_RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    group = multiring.init()
    if group.rank == 1:
        return _ENDS[kind]()
    if kind == "error beside a large result":
        return np.ones(_VERY_LARGE)
    if kind not in ("lock", "refused here", "killed while returning"):
        group.barrier()
    return group.rank


def large(base: "np.ndarray[Any, np.dtype[np.float64]]") -> "np.ndarray[Any, np.dtype[np.float64]]":
    """Return a large array of the rank's own, made from a large argument."""
    return base + multiring.init().rank


def large_is_right(run: Run) -> list[bool]:
    """Return whether each rank's large array has arrived."""
    base = np.arange(_LARGE, dtype=np.float64)
    return [bool(np.array_equal(each, base + rank)) for rank, each in enumerate(run(large, base))]


def nest() -> tuple[float, list[int]]:
    """Call init twice, write to standard output without a line's end, and run a job of two ranks within this rank."""
    first = multiring.init()
    group = multiring.init()
    total = np.ones(1)
    group.all_reduce(total)
    assert first is group
    os.write(1, b"x" * 100_000 + b"\xff\xfe\x00 no line")
    return float(total[0]), [10 * group.rank + inner for inner in multiring.run(inner_rank, 2)]


def train_elastically(killed: int | None = None) -> tuple[int, int, int]:
    """Train with `mt.elastic.run`. All ranks lose a collective once and join again, or one rank is killed.

    Return the rank, the number of steps, and how often the training was begun.
    """
    import multiring.torch as mt  # noqa: PLC0415 -- the driver does not need it

    mt.init()
    begun = [0]

    def train(state: Any) -> None:
        begun[0] += 1
        while state.step < 6:
            mt.barrier()
            if state.step == 3 and begun[0] == 1:
                if mt.rank() == killed:
                    os.kill(os.getpid(), signal.SIGKILL)
                raise CollectiveError("of this test")
            state.step += 1
            state.commit()

    state: Any = mt.elastic.TorchState(step=0)
    mt.elastic.run(train)(state)
    return mt.rank(), state.step, begun[0]


def inner_rank() -> int:
    """Return the rank, after the ranks have met."""
    group = multiring.init()
    group.barrier()
    return group.rank


def wait_for_ever(folder: str) -> None:
    """Write a file when all ranks have met, and wait, with a child process."""
    group = multiring.init()
    group.barrier()
    (Path(folder) / f"at-work-{group.rank}").touch()
    os.system("/bin/sleep 4324 &")  # noqa: S605 -- a child that outlives its parent
    time.sleep(4325)


@contextmanager
def session(framework: str, address: str) -> Iterator[Run]:
    """Connect to a cluster, and give a function that runs a function on two ranks."""
    if framework == "dask":
        from distributed import Client  # noqa: PLC0415 -- only one of the frameworks is there

        import multiring.dask  # noqa: PLC0415 -- as above

        with Client(address) as client:
            yield lambda function, *args: multiring.dask.run(client, function, 2, args)
    elif framework == "ray":
        import ray  # noqa: PLC0415 -- as above

        import multiring.ray  # noqa: PLC0415 -- as above

        ray.init(address=address)
        yield lambda function, *args: multiring.ray.run(function, 2, args, placement="SPREAD")
    else:
        from pyspark.sql import SparkSession  # noqa: PLC0415 -- as above

        import multiring.spark  # noqa: PLC0415 -- as above

        made = SparkSession.builder.master(address).config("spark.ui.enabled", "false").config("spark.cores.max", "2")
        spark = made.getOrCreate()
        yield lambda function, *args: multiring.spark.run(function, 2, args)
        spark.stop()


def main(framework: str, address: str, folder: str = "") -> None:
    """Run the driver."""
    with session(framework, address) as run:
        if folder:
            (Path(folder) / "driver").write_text(str(os.getpid()), encoding="ascii")
            run(wait_for_ever, folder)
            return
        report("large", lambda: large_is_right(run))
        for kind in ODD:
            report(kind, lambda kind=kind: run(end_oddly, kind))  # type: ignore[misc]
        report("nested", lambda: run(nest))
        report("elastic", lambda: run(train_elastically))


if __name__ == "__main__":
    # The classes must have the names by which the ranks import them.
    from tests.support.cluster_attacks import main as main_of_module

    main_of_module(*sys.argv[1:])
