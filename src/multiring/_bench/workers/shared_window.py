"""Time an all-reduce written by hand over an MPI shared window; see contract.py.

A program without a communication library can do this. Every rank's buffer lies in memory that all ranks of the host
have mapped (MPI_Win_allocate_shared). Each rank sums its slice of all buffers with NumPy and writes the sum into all
buffers. A barrier before and after separates the ranks. Arguments are as for mpi.py.

Source: MPI: A Message-Passing Interface Standard 4.1, section 12.2.3 "Window That Allocates Shared Memory".
"""

import sys
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

if TYPE_CHECKING:
    from multiring._bench.workers import contract
else:
    import contract  # beside this script, which may run where multiring is not installed

UFUNCS = {"sum": np.add, "min": np.minimum, "max": np.maximum, "product": np.multiply}
# A slice is processed in pieces that stay in a core's own cache until they are written to every rank.
PIECE_BYTES = 128 * 1024


class Window:
    """One buffer of each rank of the host, with shape (count,), and their sum."""

    def __init__(self, case: contract.Case, comm: MPI.Intracomm) -> None:
        dtype = np.dtype(case.dtype)
        self._comm = comm
        self._window = MPI.Win.Allocate_shared(case.size_bytes, dtype.itemsize, comm=comm)
        self._reduce = UFUNCS[case.op]
        # The memory has the buffer interface, but its stub has another type.
        shared: list[Any] = [self._window.Shared_query(source)[0] for source in range(comm.size)]
        buffers: list[contract.Array] = [np.frombuffer(memory, dtype, case.count) for memory in shared]
        self.mine = buffers[comm.rank]
        step = PIECE_BYTES // dtype.itemsize
        first, last = (case.count * (comm.rank + more) // comm.size for more in (0, 1))
        # Create the views once: creating them in each call would add Python's time to the memory's time.
        self._pieces = [
            [buffer[start : min(start + step, last)] for buffer in buffers] for start in range(first, last, step)
        ]
        # Use one access epoch for all calls, because between calls only the order of memory accesses matters.
        self._window.Lock_all(MPI.MODE_NOCHECK)

    def all_reduce(self) -> None:
        """Reduce every rank's `mine` into every rank's `mine`; all ranks call it."""
        self._meet()
        reduce = self._reduce
        for first, second, *others in self._pieces or ():
            reduce(first, second, out=first)
            for other in others:
                reduce(first, other, out=first)
            second[:] = first
            for other in others:
                other[:] = first
        self._meet()

    def close(self) -> None:
        """Free the memory; `mine` must not be used any more."""
        self._window.Unlock_all()
        self._window.Free()

    def _meet(self) -> None:
        self._window.Sync()
        self._comm.Barrier()
        self._window.Sync()


def main(case: contract.Case) -> None:
    """Time the case, and write the answer."""
    comm = MPI.COMM_WORLD
    contract.pin(case, comm.rank)
    if case.collective != "all_reduce":
        contract.refuse(case, comm.rank, f"only all_reduce is written by hand, not {case.collective}")
    if case.op not in UFUNCS or case.dtype == "bfloat16":
        contract.refuse(case, comm.rank, f"NumPy alone has no {case.op} of {case.dtype}")
    if comm.size < 2:
        contract.refuse(case, comm.rank, "one rank has no other rank to share a window with")
    windows = [Window(case, comm) for _ in range(contract.num_buffers(case))]
    seconds = contract.verify_and_time(
        case,
        (comm.rank, comm.size),
        [(window.mine, window.mine) for window in windows],
        lambda index: windows[index].all_reduce(),
        comm.Barrier,
    )
    version = " ".join(MPI.Get_library_version().partition("\n")[0].partition(",")[0].replace("Version:", "").split())
    settings = dict(word.split("=", 1) for word in sys.argv[2:])
    settings["piece"] = f"{PIECE_BYTES} bytes"
    contract.write_result(case, comm.rank, seconds, f"{version}, NumPy {np.__version__}", settings)
    for window in windows:
        window.close()


if __name__ == "__main__":
    contract.run_cases(main)
