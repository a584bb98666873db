"""Time one collective of an MPI, called through mpi4py as its documentation advises; see contract.py.

One worker serves every MPI; the Python that runs it determines the MPI. Arguments after the case file are `name=value`
pairs: the settings of this MPI, which the worker writes into the result.

Buffers and datatypes are made once, outside the timed calls. mpi4py's tutorial ("Communicating Python objects and array
data", https://mpi4py.readthedocs.io/en/stable/tutorial.html) describes upper-case methods on explicit
`[data, count, type]` as nearly as fast as C.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

if TYPE_CHECKING:
    from multiring._bench.workers import contract
else:
    import contract  # beside this script, which may run where multiring is not installed

TYPES = {
    "float16": MPI.FLOAT16_T,
    "float32": MPI.FLOAT,
    "float64": MPI.DOUBLE,
    "int8": MPI.INT8_T,
    "int16": MPI.INT16_T,
    "int32": MPI.INT32_T,
    "int64": MPI.INT64_T,
    "uint8": MPI.UINT8_T,
}
OPS = {"sum": MPI.SUM, "min": MPI.MIN, "max": MPI.MAX, "product": MPI.PROD}
# These collectives read their input from the output buffer: all_gather is much faster that way, all_reduce a little.
# A reduce_scatter would not be faster, and would overwrite its input.
IN_PLACE = ("all_reduce", "all_gather")

Pair = tuple[contract.Array, contract.Array]
Spec = list[Any]


def datatype(case: contract.Case, rank: int) -> MPI.Datatype:
    """Return MPI's type for the case's elements; refuse the case if there is none."""
    if case.collective == "barrier":
        return MPI.BYTE
    if case.dtype not in TYPES or TYPES[case.dtype] == MPI.DATATYPE_NULL:
        if case.collective in ("all_reduce", "reduce_scatter"):
            contract.refuse(case, rank, f"this MPI has no {case.dtype} to reduce")
        return MPI.INT16_T  # the elements are only moved, so any type of that size works
    if case.op not in OPS:
        contract.refuse(case, rank, f"MPI has no operation {case.op}")
    return TYPES[case.dtype]


def make_buffers(case: contract.Case, rank: int, ranks: int) -> list[Pair]:
    """Return input and output by index; an "arena" is memory from MPI_Alloc_mem."""
    dtype = contract.numpy_dtype(case.dtype)

    def array(count: int) -> contract.Array:
        if case.buffers == "arena":
            memory: Any = MPI.Alloc_mem(max(count * dtype.itemsize, 1))  # a buffer, but its stub has another type
            made: contract.Array = np.frombuffer(memory, dtype, count)
            return made
        return np.empty(count, dtype)

    pairs = []
    for _ in range(contract.num_buffers(case)):
        if case.collective in ("all_to_all", "reduce_scatter"):
            pairs.append((array(case.count), array(contract.output_count(case, ranks))))
            continue
        whole = array(case.count)
        part = case.count // ranks
        if case.collective == "all_gather":
            pairs.append((whole[rank * part : (rank + 1) * part], whole))
        else:
            pairs.append((whole, whole))
    return pairs


def make_call(case: contract.Case, pairs: list[Pair], of: MPI.Datatype) -> Callable[[int], object]:
    """Return a function that runs the case's collective on the buffer with a given index."""
    comm = MPI.COMM_WORLD
    op, root, here = OPS.get(case.op, MPI.SUM), case.root, MPI.IN_PLACE
    # Pass the data as bytes: mpi4py asks an array for its buffer, and the 16-bit float types of other packages have no
    # buffer.
    specs: list[tuple[Spec, Spec]] = [
        ([taken.view(np.uint8), of], [given.view(np.uint8), of]) for taken, given in pairs
    ]
    # Pass counts although all are equal: in Open MPI 5, this takes half the time of Reduce_scatter_block.
    counts = [case.count // comm.size] * comm.size
    calls: dict[str, Callable[[int], object]] = {
        "all_reduce": lambda index: comm.Allreduce(here, specs[index][1], op),
        "reduce_scatter": lambda index: comm.Reduce_scatter(specs[index][0], specs[index][1], counts, op),
        "all_gather": lambda index: comm.Allgather(here, specs[index][1]),
        "broadcast": lambda index: comm.Bcast(specs[index][1], root),
        "all_to_all": lambda index: comm.Alltoall(specs[index][0], specs[index][1]),
        "barrier": lambda _: comm.Barrier(),
    }
    return calls[case.collective]


def main(case: contract.Case) -> None:
    """Time the case, and write the answer."""
    rank, ranks = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    contract.pin(case, rank)
    of = datatype(case, rank)
    pairs = make_buffers(case, rank, ranks)
    call = make_call(case, pairs, of)
    seconds = contract.verify_and_time(case, (rank, ranks), pairs, call, MPI.COMM_WORLD.Barrier)
    version = " ".join(MPI.Get_library_version().partition("\n")[0].partition(",")[0].replace("Version:", "").split())
    in_place = "MPI_IN_PLACE" if case.collective in IN_PLACE else "separate buffers"
    settings = contract.given_settings()
    settings["buffers"] = "of the call itself" if case.collective in ("broadcast", "barrier") else in_place
    contract.write_result(case, rank, seconds, f"{version}, mpi4py {_mpi4py_version()}", settings)


def _mpi4py_version() -> str:
    import mpi4py  # noqa: PLC0415 -- its name alone would be shadowed by MPI's above

    return str(mpi4py.__version__)


if __name__ == "__main__":
    contract.run_cases(main)
