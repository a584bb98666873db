"""Train under elastic.run while ranks come and go, and note what the spared rank uses; a rank of generations.py."""

import ctypes
import gc
import json
import os
import sys
import time
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[3]))  # lets this script import from the repository root

from benchmarks.evidence.growing.usage import usage_of

import multiring.adapters as ma
from multiring._settings import Settings
from multiring.adapters import elastic

folder, tells_why = Path(sys.argv[1]), "--why" in sys.argv
born = int(Settings.from_environment().intake or Settings.from_environment().rank or 0)
FIRST, SETTLED = 10, 4  # generations before the comparison; steps before a measurement
if tells_why and born == 0:
    tracemalloc.start(8)
ma.init()
state = elastic.ObjectState(
    bcast_object=ma.broadcast_object,
    get_rank=ma.rank,
    gather_object=ma.allgather_object,
    step=0,
    weights=np.zeros(4096),
)
snapshots: list[tuple[Any, Counter[str]]] = []
generations = 0


def note() -> None:
    """Write down what this process uses in the present generation."""
    global generations  # noqa: PLW0603 -- a script
    generations += 1
    if tells_why and generations == FIRST:
        gc.collect()
        snapshots.append((tracemalloc.take_snapshot(), kinds()))
        write_memory("in generation 10")
    with (folder / "usage").open("a") as file:
        file.write(json.dumps([ma.size(), usage_of(os.getpid())]) + "\n")


def kinds() -> Counter[str]:
    """Return the number of objects of each type."""
    return Counter(f"{type(each).__module__}.{type(each).__qualname__}" for each in gc.get_objects())


def tell() -> None:
    """Write down what has grown."""
    gc.collect()
    [(before, objects)] = snapshots
    lines = ["\nPython's memory by line:"]
    lines += [
        "\n".join([str(each), *[f"        {frame}" for frame in each.traceback.format()[-6:]]])
        for each in tracemalloc.take_snapshot().compare_to(before, "traceback")[:14]
    ]
    lines += ["\nobjects by type:", *map(str, (kinds() - objects).most_common(30))]
    with (folder / "why").open("a") as told:
        told.write("\n".join(lines) + "\n")
    write_memory("at the end")


def write_memory(when: str) -> None:
    """Write down the C library's arenas, and the process's mappings."""
    libc = ctypes.CDLL(None)
    libc.fopen.restype, libc.fopen.argtypes = ctypes.c_void_p, [ctypes.c_char_p, ctypes.c_char_p]
    libc.malloc_info.argtypes, libc.fclose.argtypes = [ctypes.c_int, ctypes.c_void_p], [ctypes.c_void_p]
    with (folder / "why").open("a") as told:
        told.write(f"\nmemory {when}:\n")
    file = libc.fopen(str(folder / "why").encode(), b"a")
    libc.malloc_info(0, file)
    libc.fclose(file)
    with (folder / "why").open("a") as told:
        told.write("\n" + Path("/proc/self/smaps").read_text())


@elastic.run
def train(state: Any) -> None:
    """Train until the file `stop` is there."""
    steps = 0
    while not ma.broadcast_object((folder / "stop").exists()):
        state.weights = state.weights + np.asarray(ma.allreduce(np.ones(4096)))
        state.step += 1
        state.commit()
        steps += 1
        if steps == SETTLED:
            if born == 0:
                note()
            (folder / f"pid-{born}.new").write_text(str(os.getpid()))
            (folder / f"pid-{born}.new").rename(folder / f"pid-{born}")
        time.sleep(0.01)


train(state)
if tells_why and born == 0:
    tell()
ma.shutdown()
