"""What a batch is made of, and the filling of its rows: the same in threads and in processes."""

import math
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from multiring.data.balance.decision import COPY, DECODE, REQUESTED
from multiring.data.dataset import Samples
from multiring.data.feeding.widening import put_exactly, widened
from multiring.data.orders import MixtureOrder, WeightedOrder
from multiring.data.permutation import Numbers
from multiring.data.progress import Step
from multiring.errors import DataError

Array = NDArray[Any]
Allocate = Callable[[tuple[int, ...], Any], Array]
_ALIGNMENT = 64
_PIECE = 1 << 20  # bytes of a batch that are worth a worker's turn, where nothing is decoded


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """How a sample's fields lie in a batch: arrays in one, anything else in lists."""

    arrays: Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]]
    lists: tuple[str, ...]

    @property
    def row_bytes(self) -> int:
        """Return a sample's bytes in the arrays."""
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.arrays.values())

    def offsets(self, rows: int) -> tuple[dict[str, int], int]:
        """Return where each field's array begins in one piece of memory for `rows` samples, and how large that is."""
        found, place = {}, 0
        for name, (shape, dtype) in self.arrays.items():
            found[name] = place
            place += -(-rows * math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        return found, place

    def views(self, memory: memoryview | Any, begin: int, rows: int) -> dict[str, Array]:
        """Return the fields' arrays (rows, ...) in a piece of memory from `begin` on."""
        offsets, _ = self.offsets(rows)
        return {
            name: np.frombuffer(memory, dtype, rows * math.prod(shape), begin + offsets[name]).reshape(rows, *shape)
            for name, (shape, dtype) in self.arrays.items()
        }

    def widened(self, types: Mapping[str, np.dtype[Any]]) -> "Layout":
        """Return the layout with wider types for some fields."""
        found = {name: (shape, types.get(name, dtype)) for name, (shape, dtype) in self.arrays.items()}
        return replace(self, arrays=found)


def layout_of(record: Mapping[str, Any]) -> Layout:
    """Return how records like this one lie in a batch: numbers and arrays in arrays, text and the like in lists."""
    arrays: dict[str, tuple[tuple[int, ...], np.dtype[Any]]] = {}
    lists = []
    for name, value in record.items():
        if isinstance(value, bool | int | float | complex | np.generic | np.ndarray) and not isinstance(
            value, str | bytes | np.ma.MaskedArray
        ):
            array = np.asarray(value)
            if not array.dtype.hasobject:
                arrays[name] = (array.shape, array.dtype.newbyteorder("="))
                continue
        lists.append(name)
    return Layout(arrays=arrays, lists=tuple(lists))


@dataclass(frozen=True, slots=True)
class Failure:
    """A sample that could not be read."""

    row: int
    number: int
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Filled:
    """What filling some rows gave beside the arrays."""

    lists: Mapping[str, list[Any]]
    failures: Sequence[Failure]
    wider: Mapping[str, np.dtype[Any]] = field(default_factory=dict)  # types that the samples need; rows lack values
    spent: Mapping[str, float] = field(default_factory=dict)  # seconds of the worker, by stage


def fill(samples: Samples, layout: Layout, rows: Mapping[str, Array], first: int, wanted: "Wanted") -> Filled:
    """Read samples into a batch's rows from `first` on.

    Args:
        samples: the data set.
        layout: of its batches.
        rows: the batch's arrays by field.
        first: the row of the first sample.
        wanted: which samples.
    """
    lists: dict[str, list[Any]] = {name: [] for name in layout.lists}
    failures: list[Failure] = []
    wider: dict[str, np.dtype[Any]] = {}
    if (at := getattr(samples, "at", None)) is not None:
        at(wanted.epoch, wanted.begin)
    direct = getattr(samples, "fills", None)
    clock = getattr(samples, "clock", None)
    began, began_cpu, began_queued = time.perf_counter(), time.thread_time(), queued_s()
    copied, made = 0.0, 0
    if clock is not None:
        clock.take()  # what was read in between is none of this batch's
    at_once = _filled_at_once(samples, layout, rows, first, wanted)
    lists.update(at_once or {})
    one_by_one = wanted.numbers.tolist() if at_once is None else []
    for row, number in enumerate(one_by_one, first):
        out = {name: array[row] if array.ndim > 1 else array[row : row + 1] for name, array in rows.items()}
        try:
            if direct is not None and not lists and direct(number, out):
                continue
            record = samples.sample(number, wanted.epoch, wanted.draw(row - first))
            before = time.perf_counter()
            made += 1
            _put(record, layout, out, number, wider)
            copied += time.perf_counter() - before
        except (DataError, OSError) as error:
            failures.append(Failure(row, number, str(error)))
            record = {}
        for name, values in lists.items():
            values.append(record.get(name))
    spent = {} if clock is None else clock.take()
    read = sum(spent.get(stage, 0.0) for stage in REQUESTED)
    rest = time.perf_counter() - began - read - copied
    # What is read straight into the batch is not decoded.
    spent |= {COPY: copied if made else rest, DECODE: rest if made else 0.0}
    spent |= {"cpu": time.thread_time() - began_cpu, "queued": queued_s() - began_queued}
    return Filled(lists=lists, failures=failures, wider=wider, spent=spent)


def pieces_of(samples: Samples, layout: Layout, rows: int, workers: int) -> int:
    """Return in how many pieces workers make a batch: some for each, unless one has read all of it sooner."""
    most = 2 * workers
    return min(most, 1 + rows * layout.row_bytes // _PIECE) if getattr(samples, "is_only_read", False) else most


class _OwnFile:
    """A thread's own /proc/thread-self/schedstat, kept open: opening it takes as long as a batch of small records."""

    def __init__(self) -> None:
        self.thread, self.file = -1, -1

    def read(self) -> bytes:
        """Return what it says now.

        Raises:
            OSError: there is none.
        """
        thread = threading.get_native_id()
        if thread != self.thread:
            # After a fork there is the other process's, under a number that may be anything's here: it is left alone.
            self.file = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
            self.thread = thread
        return os.pread(self.file, 128, 0)

    # Bound here: they may be gone when the interpreter ends.
    def __del__(
        self, close: Callable[[int], None] = os.close, own: Callable[[], int] = threading.get_native_id
    ) -> None:
        """Close it: the thread has ended."""
        if self.file >= 0 and self.thread == own():
            close(self.file)


class _Own(threading.local):
    """What each thread has of its own, made when it asks first, and gone with it."""

    def __init__(self) -> None:
        self.file = _OwnFile()


_own = _Own()


def queued_s() -> float:
    """Return the seconds in which this thread could have run, but had no core; 0 where the system does not say."""
    try:
        return int(_own.file.read().split()[1]) * 1e-9
    except (OSError, IndexError, ValueError):
        return 0.0


def _filled_at_once(
    samples: Samples, layout: Layout, rows: Mapping[str, Array], first: int, wanted: "Wanted"
) -> dict[str, list[Any]] | None:
    """Fill all rows by few calls, and return the lists; None where it has to be done one by one."""
    fills_rows = getattr(samples, "fills_rows", None)
    end = first + len(wanted.numbers)
    if fills_rows is None or end == first:
        return None
    try:
        found: dict[str, list[Any]] | None = fills_rows(
            wanted.numbers, {name: each[first:end] for name, each in rows.items()}
        )
    except (DataError, OSError):
        return None  # one by one it shows which of them it is
    return found if found is None or found.keys() == set(layout.lists) else None


def _put(
    record: Mapping[str, Any],
    layout: Layout,
    out: Mapping[str, Array],
    number: int,
    wider: dict[str, np.dtype[Any]],
) -> None:
    """Write a sample's row; in place of a value for which a field's type is too narrow, note a wider one."""
    if record.keys() != layout.arrays.keys() | set(layout.lists):
        raise DataError(
            f"sample {number} has the fields {sorted(record)}, the first one {sorted({*layout.arrays, *layout.lists})}"
        )
    for name, (shape, dtype) in layout.arrays.items():
        value = _as_array(record[name])
        if value.dtype == dtype and value.shape == shape:
            out[name][...] = value  # nearly always
            continue
        needed = widened(wider.get(name, dtype), value.dtype.newbyteorder("="))
        if value.shape != shape or needed is None:
            raise DataError(
                f"sample {number}: {name} is {value.dtype} {value.shape}, the first one's {dtype} {shape}; a batch "
                "needs them alike: want a transform that crops or pads"
            )
        if needed != dtype:
            wider[name] = needed
        elif not put_exactly(out[name], value):
            raise DataError(
                f"sample {number}: {name} is {value.dtype}, others are {dtype}, which does not hold all its values "
                "exactly: want a transform that gives them one type"
            )


def _as_array(value: Any) -> Array:
    """Return a value as an array; one of objects where it is none."""
    if isinstance(value, np.ndarray):
        return value
    try:
        return np.asarray(value)
    except ValueError:  # lists of unlike lengths
        return np.empty((), object)


def wider_of(pieces: Iterable[Filled]) -> dict[str, np.dtype[Any]]:
    """Return the types that the samples of some pieces need together, where the layout's are too narrow."""
    found: dict[str, np.dtype[Any]] = {}
    for piece in pieces:
        for name, dtype in piece.wider.items():
            # There is one: only numbers, or only text, widen one type.
            found[name] = widened(found.get(name, dtype), dtype) or dtype
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """Samples, in a batch's order."""

    epoch: int
    numbers: Numbers
    places: Numbers | None = None  # in the epoch, where it may have a sample twice
    begin: int = 0  # of the epoch's samples, where the step begins

    def draw(self, index: int) -> int:
        """Return what tells a sample's uses apart."""
        return 0 if self.places is None else int(self.places[index])

    def piece(self, begin: int, end: int) -> "Wanted":
        """Return some of them."""
        places = None if self.places is None else self.places[begin:end]
        return replace(self, numbers=self.numbers[begin:end], places=places)


@dataclass(kw_only=True, slots=True)
class Job:
    """A batch that workers make, in pieces."""

    wanted: Wanted
    arrays: dict[str, Array]
    slot: int = -1  # of the memory that it shares with processes
    cancelled: bool = False
    error: BaseException | None = None
    _pieces: dict[int, Filled] = field(default_factory=dict)
    _left: int = 0
    _done: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def cut(self, count: int) -> list[tuple[int, int]]:
        """Return its pieces, first and last row, `count` of them or fewer; to be called once."""
        rows = len(self.wanted.numbers)
        size = max(1, -(-rows // count))
        pieces = [(begin, min(rows, begin + size)) for begin in range(0, rows, size)]
        self._left = len(pieces)
        if not pieces:
            self._done.set()
        return pieces

    def finish(self, first: int, filled: Filled) -> None:
        """Note that the piece from row `first` on is done."""
        with self._lock:
            self._pieces[first] = filled
            self._left -= 1
            if not self._left:
                self._done.set()

    def fail(self, error: BaseException) -> None:
        """Have whoever waits raise `error`."""
        self.error = error
        self._done.set()

    def wider(self) -> dict[str, np.dtype[Any]]:
        """Return the types that a finished batch's samples need, where its own are too narrow: it is made anew then."""
        return wider_of(self._pieces.values())

    def is_done(self) -> bool:
        """Return whether nobody need wait."""
        return self._done.is_set()

    def spent(self) -> dict[str, float]:
        """Return what workers spent on it, by stage."""
        found: dict[str, float] = defaultdict(float)
        for piece in self._pieces.values():
            for name, each in piece.spent.items():
                found[name] += each
        return dict(found)

    def wait(self) -> tuple[dict[str, list[Any]], list[Failure]]:
        """Return the batch's lists, and which samples could not be read, once it is done.

        Raises:
            DataError: it cannot be.
        """
        while not self._done.wait(1.0):  # in pieces: so Ctrl-C is served everywhere
            pass
        if self.error is not None:
            raise self.error
        pieces = [self._pieces[first] for first in sorted(self._pieces)]
        lists = {
            name: [each for piece in pieces for each in piece.lists[name]]
            for name in (pieces or [Filled(lists={}, failures=[])])[0].lists
        }
        return lists, [each for piece in pieces for each in piece.failures]


def wanted_by(samples: Samples, step: Step) -> Wanted:
    """Return the samples of a step on a rank; one that has none computes on another's, which counts for nothing."""
    numbers, places = step.samples, step.places
    if not len(numbers):
        places = np.array([step.begin])
        numbers = samples.order.samples(step.epoch, places)
    repeats = isinstance(samples.order, WeightedOrder | MixtureOrder)
    return Wanted(epoch=step.epoch, numbers=numbers, places=places if repeats else None, begin=step.begin)


def batch_of(samples: Samples, step: Step) -> dict[str, Any]:
    """Return a step's batch on a rank, made here and now.

    Raises:
        DataError: a sample cannot be read.
    """
    return made_of(samples, wanted_by(samples, step))


def made_of(samples: Samples, wanted: Wanted) -> dict[str, Any]:
    """Return a batch of samples, made here and now.

    Raises:
        DataError: a sample cannot be read.
    """
    layout = layout_of(samples.sample(int(wanted.numbers[0]), wanted.epoch, wanted.draw(0)))
    count = len(wanted.numbers)
    while True:
        arrays = {name: np.empty((count, *shape), dtype) for name, (shape, dtype) in layout.arrays.items()}
        filled = fill(samples, layout, arrays, 0, wanted)
        if not filled.wider:
            break
        layout = layout.widened(filled.wider)
    if filled.failures:
        raise DataError(filled.failures[0].text)
    return {**arrays, **filled.lists}
