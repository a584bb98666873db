"""The common part of all workers of `multiring bench`: cases, data, verification, timing and answers.

A worker is a script that is run by its path, one process per rank: `PYTHON worker.py CASES.json`. It may run in a
peer's own Python. So this module imports the standard library and NumPy (1.23 or newer) only. A worker imports it by

    if TYPE_CHECKING:
        from multiring._bench.workers import contract
    else:
        import contract  # beside this script, which may run where multiring is not installed

The worker's folder comes first on its path, so no worker may have the name of a package that it imports.

    def main(case: contract.Case) -> None:
        contract.pin(case, rank)         # before the library starts its threads
        ... start the library, make `contract.num_buffers(case)` buffers ...
        contract.verify(...)             # each buffer, filled with `inputs`, against `expected`
        seconds = contract.time_calls(call, barrier, case)
        contract.write_result(case, rank, seconds, "4.1", {"setting": "value"})
        ... end the library, so that the next case can start it, or keep it ...

    contract.run_cases(main)

`verify_and_time` does the middle part for libraries that work on memory that NumPy can write.
"""

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all", "barrier")
OPS = ("sum", "average", "min", "max", "product")
DTYPES = ("bfloat16", "float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8")
TORCH_OURS = "multiring-torch"  # multiring as a backend of torch.distributed
# The data has a prime period, which does not divide the offsets of chunks, so a chunk in the wrong place is detected.
_PERIOD = 1021
_MARGIN = 254 / 250  # sums of decoded elements round, too
_LEVELS = 5  # values 0 to 4: sums over 64 ranks are exact in bfloat16

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Case:
    """One case to time. All ranks of a job read the same case.

    count: elements of the longer side. all_reduce and broadcast have one buffer of `count` elements. reduce_scatter
    takes `count` and returns count / ranks on each rank; all_gather takes count / ranks and returns `count`; all_to_all
    takes and returns `count`. A `count` that ranks divide is a multiple of their number.
    buffers: "arena" (memory that the library allocates, if it can) or "ordinary".
    pool_bytes: 0 for one buffer that all calls use; else calls rotate over buffers of this size in total.
    calls, warmup: the number of timed calls, and the number of calls before them.
    cores: rank r runs on cores[r % len(cores)]; empty: ranks are not bound.
    turns, seconds: of a worker that times several libraries in turns: the number of turns, and the time of the calls in
    each turn if `calls` is 0.
    """

    library: str
    collective: str
    dtype: str
    count: int
    out_dir: str
    op: str = "sum"
    buffers: str = "ordinary"
    pool_bytes: int = 0
    calls: int = 20
    warmup: int = 3
    root: int = 0
    cores: tuple[int, ...] = ()
    turns: int = 1
    seconds: float = 0.0

    @property
    def size_bytes(self) -> int:
        """The number of bytes of the longer side."""
        return self.count * itemsize(self.dtype)


class _Refused(Exception):  # noqa: N818 -- not an error: the library lacks the operation, and its answer says so
    pass


def write_cases(cases: Sequence[Case], path: Path) -> None:
    """Write the cases of a job for `read_cases`."""
    path.write_text(json.dumps([asdict(case) for case in cases]), encoding="utf-8")


def read_cases(path: Path) -> list[Case]:
    """Return the cases that `write_cases` wrote."""
    rows = json.loads(path.read_text(encoding="utf-8"))
    return [Case(**{**fields, "cores": tuple(fields["cores"])}) for fields in rows]


def run_cases(main: Callable[[Case], None]) -> None:
    """Call `main` for each case in the file named by the first argument.

    A refused case does not end the others.
    """
    for case in read_cases(Path(sys.argv[1])):
        with contextlib.suppress(_Refused):
            main(case)


def itemsize(dtype: str) -> int:
    """Return the bytes of one element, even for types that NumPy lacks."""
    return 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize


def numpy_dtype(dtype: str) -> "np.dtype[Any]":
    """Return NumPy's type called `dtype`.

    The type bfloat16 comes from ml_dtypes, which a peer's Python need not have.
    """
    if dtype == "bfloat16":
        import ml_dtypes  # noqa: PLC0415 -- imported only if needed

        made: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
        return made
    return np.dtype(dtype)


def pin(case: Case, rank: int) -> None:
    """Bind this process, and the threads that it will start, to the case's core for `rank`."""
    if case.cores:
        os.sched_setaffinity(0, {case.cores[rank % len(case.cores)]})


# ---- data ----


def input_count(case: Case, ranks: int) -> int:
    """Return the number of elements of a rank's input."""
    return case.count // ranks if case.collective == "all_gather" else case.count


def output_count(case: Case, ranks: int) -> int:
    """Return the number of elements of a rank's output."""
    return case.count // ranks if case.collective == "reduce_scatter" else case.count


def num_buffers(case: Case) -> int:
    """Return the number of buffers (or pairs of input and output) that the calls use in turn."""
    return max(1, -(-case.pool_bytes // case.size_bytes)) if case.size_bytes else 1


def inputs(case: Case, rank: int, ranks: int) -> Array:
    """Return `rank`'s input: small integers, exact in every type, different on each rank. Shape (input_count,)."""
    return _values(case, rank, ranks, 0, input_count(case, ranks))


def expected(case: Case, rank: int, ranks: int) -> Array:
    """Return the output that `rank` must get, computed by NumPy.

    Shape (output_count,).
    """
    part = case.count // ranks
    if case.collective == "all_reduce":
        return _combined(case, ranks, 0, case.count)
    if case.collective == "reduce_scatter":
        return _combined(case, ranks, rank * part, (rank + 1) * part)
    if case.collective == "all_gather":
        return np.concatenate([inputs(case, source, ranks) for source in range(ranks)])
    if case.collective == "all_to_all":
        sent = [_values(case, source, ranks, rank * part, (rank + 1) * part) for source in range(ranks)]
        return np.concatenate(sent)
    return inputs(case, case.root, ranks)


def _values(case: Case, rank: int, ranks: int, start: int, stop: int) -> Array:
    levels = np.random.default_rng(rank).integers(0, _LEVELS, _PERIOD)
    if case.op == "product":
        levels = 1 + (levels == 0)  # ones and a few twos, because powers of two are exact
    elif case.op == "average":
        levels = levels * ranks  # make the mean an integer
    period = np.roll(levels.astype(numpy_dtype(case.dtype)), -(start % _PERIOD))
    return np.resize(period, stop - start)


def _combined(case: Case, ranks: int, start: int, stop: int) -> Array:
    # The values of all ranks have the same period, and the result has it too. So combining one period is enough.
    count = min(_PERIOD, stop - start)
    total = _values(case, 0, ranks, start, start + count)
    if total.dtype.itemsize <= 2 and case.dtype in ("bfloat16", "float16"):
        total = total.astype(np.float32)
    combine = {"min": np.minimum, "max": np.maximum, "product": np.multiply}.get(case.op, np.add)
    for rank in range(1, ranks):
        combine(total, _values(case, rank, ranks, start, start + count).astype(total.dtype), out=total)
    if case.op == "average":
        total //= total.dtype.type(ranks)
    return np.resize(total.astype(numpy_dtype(case.dtype)), stop - start)


def wire_tolerance(wire: str, ranks: int) -> float:
    """Return the tolerance of a sum over `ranks` ranks whose elements were encoded as `wire`.

    `wire` may be "", an exact wire. Only the worker of multiring has wire types, so multiring is installed.

    Sums of this module's data are exact in 16 bits. A type with scales changes an element at each encoding, by at most
    the type's relative error times the largest element of the block. Every part of a sum is encoded once, and the sum
    once more.
    """
    if not wire:
        return 0.0
    from multiring._schedule import FORMATS, wire_of  # noqa: PLC0415 -- other workers have no multiring

    form = FORMATS.get(wire_of(wire))
    return 2 * (_LEVELS - 1) * ranks * form.error * _MARGIN if form is not None and form.is_scaled else 0.0


def verify(case: Case, rank: int, got: Array, want: Array, tolerance: float = 0.0) -> None:
    """Exit unless every element of `got` is equal to the same element of `want`, within `tolerance`.

    Raises:
        SystemExit: an element differs. The message names the library and the first such element, and becomes the
            rank's answer.
    """
    if got.shape != want.shape or got.dtype != want.dtype:
        what = f"got {got.dtype} of shape {got.shape}, want {want.dtype} of shape {want.shape}"
    else:
        # Do not use >: a NaN must count as wrong.
        wrong = np.flatnonzero(~(np.abs(got - want) <= tolerance) if tolerance else got != want)
        if not wrong.size:
            return
        first = int(wrong[0])
        what = f"{wrong.size} of {want.size} elements differ, the first is [{first}]: got {got[first]}, "
        what += f"want {want[first]}"
    text = f"{case.library} has a wrong result: {case.collective} {case.op} of {case.count} {case.dtype}, rank {rank}: "
    _write(case, rank, {"wrong": text + what})
    raise SystemExit(text + what)


def rest_value(case: Case) -> int:
    """Return the value that fills buffers before timing. Hundreds of in-place operations do not change the value."""
    return 1 if case.op == "product" else 0


# ---- time ----


def time_calls(call: Callable[[int], object], barrier: Callable[[], object], case: Case) -> list[float]:
    """Return the seconds of each of `case.calls` calls, made one straight after the other, as in a program.

    Args:
        call: runs one operation on the buffer with the given index.
        barrier: returns once every rank has called it.
        case: the case; the warm-up uses every buffer at least once, so that no timed call meets a fresh page.
    """
    buffers = num_buffers(case)
    for index in range(max(case.warmup, buffers if buffers > 1 else 0)):
        call(index % buffers)
    order = [index % buffers for index in range(case.calls)]
    now = time.perf_counter
    seconds = [0.0] * case.calls
    barrier()
    for turn, index in enumerate(order):
        start = now()
        call(index)
        seconds[turn] = now() - start
    return seconds


def verify_and_time(
    case: Case,
    place: tuple[int, int],
    buffers: Sequence[tuple[Array, Array]],
    call: Callable[[int], object],
    barrier: Callable[[], object],
    tolerance: float = 0.0,
) -> list[float]:
    """Verify `call` on each of `buffers`, then return `time_calls`.

    Args:
        case: the case of `call`.
        place: this process's rank, and the number of ranks.
        buffers: input and output by index, as flat NumPy views of the memory that the library works on. They are the
            same array if it works in place. The input of an in-place all_gather is a part of the output.
        call: see `time_calls`.
        barrier: see `time_calls`.
        tolerance: see `verify`.

    Raises:
        SystemExit: a result is wrong.
    """
    rank, ranks = place
    if case.collective != "barrier":
        source, want = inputs(case, rank, ranks), expected(case, rank, ranks)
        for index, (taken, given) in enumerate(buffers):
            given[:] = want.dtype.type(9)  # a value that no result can have
            taken[:] = source
            call(index)
            verify(case, rank, given, want, tolerance)
            given[:] = taken[:] = rest_value(case)
    return time_calls(call, barrier, case)


# ---- the answer ----


def given_settings() -> dict[str, str]:
    """Return the library's settings: the `name=value` words after the case file."""
    return {name: value for name, _, value in (word.partition("=") for word in sys.argv[2:])}


def write_result(
    case: Case, rank: int, seconds: Sequence[float], version: str, settings: dict[str, str], calls: int = 0
) -> None:
    """Write this rank's times to the case's folder.

    Args:
        case: the case.
        rank: the rank.
        seconds: the seconds of each call.
        version: the library's version, and other facts that identify the build.
        settings: the library's settings, with reasons from its documentation.
        calls: the number of calls behind each of `seconds` if the worker chose it, else 0.
    """
    _write(case, rank, {"seconds": list(seconds), "version": version, "settings": settings, "calls": calls})


def offer_nothing(case: Case, rank: int, why: str) -> None:
    """Answer that this library cannot run the case."""
    _write(case, rank, {"not_offered": why})


def refuse(case: Case, rank: int, why: str) -> NoReturn:
    """Answer that this library has no such operation, and end the case."""
    offer_nothing(case, rank, why)
    raise _Refused(why)


def _write(case: Case, rank: int, answer: dict[str, object]) -> None:
    path = Path(case.out_dir) / f"rank-{rank}.json"
    new = path.with_suffix(".new")
    new.write_text(json.dumps(answer), encoding="utf-8")
    new.replace(path)
