"""Run every collective on one host as an ordinary user.

    multiring run -n 2 -- python benchmarks/evidence/wheel/ordinary_user.py [--unreadable]

Arrays are in the arena and in ordinary memory. With --unreadable, the process is not dumpable, so the kernel refuses
its peers' process_vm_readv, as with Yama's ptrace scope 1. The exit code is 1 if a result is wrong, or if peers could
read an unreadable process.
"""

import argparse
import ctypes
import os
import shutil
import sys

import numpy as np

import multiring

PR_SET_DUMPABLE = 4
SIZES = (48, 3 << 16, 3 << 20)  # in elements: small arrays use slots; the largest exceeds the limit for copies


def check(group: multiring.Group, count: int, *, in_arena: bool) -> None:
    """Run every collective on `count` float32 per rank and check the results."""
    ranks, own = group.size, group.rank

    def make(value: float) -> "np.ndarray[tuple[int, ...], np.dtype[np.float32]]":
        array = group.allocate(count, "float32") if in_arena else np.empty(count, np.float32)
        array[:] = value
        return array

    total = ranks * (ranks + 1) / 2
    for _ in range(2):  # the second call takes the path for repeated calls
        reduced = make(own + 1)
        group.all_reduce(reduced)
        assert (reduced == total).all(), f"all_reduce of {count}"
    assert (group.reduce_scatter(make(own + 1)) == total).all(), f"reduce_scatter of {count}"
    gathered = group.all_gather(make(own + 1)).reshape(ranks, count)
    assert (gathered == np.arange(1, ranks + 1)[:, None]).all(), f"all_gather of {count}"
    sent = make(own + 1)
    group.broadcast(sent, root=ranks - 1)
    assert (sent == ranks).all(), f"broadcast of {count}"
    exchanged = group.all_to_all(make(own + 1)).reshape(ranks, count // ranks)
    assert (exchanged == np.arange(1, ranks + 1)[:, None]).all(), f"all_to_all of {count}"
    group.barrier()


def main() -> int:
    """Check all results; print the user and the ranks that read memory in place."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--unreadable", action="store_true", help="forbid peers to read this process's memory")
    unreadable = parser.parse_args().unreadable
    if unreadable and ctypes.CDLL(None, use_errno=True).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_DUMPABLE)")
    group = multiring.init()
    for count in SIZES:
        for in_arena in (True, False):
            check(group, count, in_arena=in_arena)
    readers = group._calls.services.context.read_by()  # noqa: SLF001 -- no public name gives this
    room = shutil.disk_usage("/dev/shm").total >> 20  # noqa: S108 -- only looked at
    print(
        f"uid {os.getuid()}, /dev/shm of {room} MB: all results right, ordinary memory read in place by ranks {readers}"
    )
    refused = unreadable and os.getuid() != 0  # root may read any process
    return 1 if refused and readers else 0


if __name__ == "__main__":
    sys.exit(main())
