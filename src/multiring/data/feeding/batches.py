"""The layout of a batch, and the code that fills its rows, for worker threads and worker processes."""

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

from multiring.data.dataset import Samples
from multiring.data.feeding.wanted import BegunSamples, WantedSamples
from multiring.data.feeding.widening import put_exactly, widened
from multiring.data.orders import MixtureOrder, WeightedOrder
from multiring.data.progress import Step
from multiring.data.stages import COPY, DECODE, REQUESTED
from multiring.errors import DataError

Array = NDArray[Any]
Allocate = Callable[[tuple[int, ...], Any], Array]
_ALIGNMENT = 64
_FILLS = "want a transform that fills missing values in, or leaves the field out of all samples"
_CROPS = 32  # crops that are decoded by one call: the memory of their files stays in a cache
_PIECE = 1 << 20  # bytes of a batch that are worth a task of their own if samples are not decoded


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchLayout:
    """The layout of a batch: numeric fields become arrays, other fields become lists.

    arrays: the shape and type of one sample's value, by field.
    lists: the names of the other fields.
    empty: the names of those among them that have no value (None) in the sample that determined the layout.
    """

    arrays: Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]]
    lists: tuple[str, ...]
    empty: tuple[str, ...] = ()

    @property
    def row_bytes(self) -> int:
        """Return the bytes of one sample in the arrays."""
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.arrays.values())

    def offsets(self, rows: int) -> tuple[dict[str, int], int]:
        """Return the fields' offsets in memory for `rows` samples, and the memory's size.

        Offsets and size are in bytes.
        """
        found, place = {}, 0
        for name, (shape, dtype) in self.arrays.items():
            found[name] = place
            place += -(-rows * math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        return found, place

    def views(self, memory: memoryview | Any, begin: int, rows: int) -> dict[str, Array]:
        """Return the fields' arrays (rows, ...), views of `memory` from byte `begin` on."""
        offsets, _ = self.offsets(rows)
        return {
            name: np.frombuffer(memory, dtype, rows * math.prod(shape), begin + offsets[name]).reshape(rows, *shape)
            for name, (shape, dtype) in self.arrays.items()
        }

    def widened(self, types: Mapping[str, np.dtype[Any]]) -> "BatchLayout":
        """Return the layout with wider types for some fields."""
        found = {name: (shape, types.get(name, dtype)) for name, (shape, dtype) in self.arrays.items()}
        return replace(self, arrays=found)


def layout_of(record: Mapping[str, Any]) -> BatchLayout:
    """Return the layout for records like this one.

    Numbers and arrays become arrays; text and other values become lists.
    """
    arrays: dict[str, tuple[tuple[int, ...], np.dtype[Any]]] = {}
    lists = []
    for name, value in record.items():
        array = _number_or_array(value)
        if array is None:
            lists.append(name)
        else:
            arrays[name] = (array.shape, array.dtype.newbyteorder("="))
    empty = tuple(name for name in lists if record[name] is None)
    return BatchLayout(arrays=arrays, lists=tuple(lists), empty=empty)


def _number_or_array(value: Any) -> Array | None:
    """Return a number or an array of numbers as an array; None for any other value."""
    if isinstance(value, str | bytes | np.ma.MaskedArray):
        return None
    if not isinstance(value, bool | int | float | complex | np.generic | np.ndarray):
        return None
    array = np.asarray(value)
    return None if array.dtype.hasobject else array


@dataclass(frozen=True, slots=True)
class SampleFailure:
    """A sample that could not be read."""

    row: int
    number: int
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Filled:
    """The results of filling some rows, besides the arrays."""

    lists: Mapping[str, list[Any]]
    failures: Sequence[SampleFailure]
    # Types that samples need because a field's type is too narrow. The rows then lack these samples' values.
    wider: Mapping[str, np.dtype[Any]] = field(default_factory=dict)
    spent: Mapping[str, float] = field(default_factory=dict)  # seconds of the worker, by stage


def fill(samples: Samples, layout: BatchLayout, rows: Mapping[str, Array], first: int, wanted: WantedSamples) -> Filled:
    """Read samples into a batch's rows from `first` on.

    Args:
        samples: the data set.
        layout: the layout of its batches.
        rows: the batch's arrays by field.
        first: the row of the first sample.
        wanted: the samples to read.
    """
    lists: dict[str, list[Any]] = {name: [] for name in layout.lists}
    failures: list[SampleFailure] = []
    wider: dict[str, np.dtype[Any]] = {}
    if (at := getattr(samples, "at", None)) is not None:
        at(wanted.epoch, wanted.begin)
    direct = getattr(samples, "fills", None)
    meter = _Meter(samples)
    copied, made = 0.0, 0
    at_once = _filled_at_once(samples, layout, rows, first, wanted)
    if at_once is None and (at_once := _cropped_at_once(samples, layout, rows, first, wanted)) is not None:
        made = len(wanted.numbers)
    lists.update(at_once or {})
    one_by_one = wanted.numbers.tolist() if at_once is None else []
    begun = BegunSamples(samples, rows, first, wanted)
    for row, number in enumerate(one_by_one, first):
        out = {name: array[row] if array.ndim > 1 else array[row : row + 1] for name, array in rows.items()}
        try:
            if direct is not None and not lists and direct(number, out):
                continue
            record = begun.sample(row - first)
            before = time.perf_counter()
            made += 1
            _put(record, layout, out, number, wider)
            copied += time.perf_counter() - before
        except (DataError, OSError) as error:
            failures.append(SampleFailure(row, number, str(error)))
            record = {}
        for name, values in lists.items():
            values.append(record.get(name))
    return Filled(lists=lists, failures=failures, wider=wider, spent=meter.spent(copied, made))


def fill_together(
    samples: Samples, layout: BatchLayout, rows: Mapping[str, Array], wanted: Sequence[WantedSamples]
) -> list[Filled] | None:
    """Read the samples of several batches of an epoch by few calls, and return the results by batch.

    The result is None if the samples must be read one by one.

    Args:
        samples: the data set.
        layout: the layout of its batches.
        rows: the arrays by field, with the rows of all batches.
        wanted: the samples of each batch.
    """
    if (at := getattr(samples, "at", None)) is not None:
        at(wanted[0].epoch, wanted[0].begin)
    meter = _Meter(samples)
    whole = replace(wanted[0], numbers=np.concatenate([each.numbers for each in wanted]), places=None)
    lists = _filled_at_once(samples, layout, rows, 0, whole)
    if lists is None:
        return None
    ends = np.cumsum([len(each.numbers) for each in wanted]).tolist()
    # Each batch has its part of the time, so that sums over some batches are right.
    spent = {name: seconds / len(wanted) for name, seconds in meter.spent(0.0, 0).items()}
    return [
        Filled(
            lists={name: values[end - len(each.numbers) : end] for name, values in lists.items()},
            failures=[],
            spent=spent,
        )
        for each, end in zip(wanted, ends, strict=True)
    ]


class _Meter:
    """The time that a worker spends on reading samples, from now on."""

    def __init__(self, samples: Samples) -> None:
        self._clock = getattr(samples, "clock", None)
        self._began, self._began_cpu, self._began_queued = time.perf_counter(), time.thread_time(), queued_s()
        if self._clock is not None:
            self._clock.take()  # discard the times of reads that do not belong to this batch

    def spent(self, copied_s: float, made: int) -> dict[str, float]:
        """Return the seconds by stage.

        Args:
            copied_s: the seconds that it took to copy records into the batch.
            made: how many records were copied; the other samples were read directly into the batch.
        """
        found: dict[str, float] = {} if self._clock is None else self._clock.take()
        read = sum(found.get(stage, 0.0) for stage in REQUESTED)
        rest = time.perf_counter() - self._began - read - copied_s
        # Samples that are read directly into the batch are not decoded, so the rest of their time is copying.
        found |= {COPY: copied_s if made else rest, DECODE: rest if made else 0.0}
        return found | {"cpu": time.thread_time() - self._began_cpu, "queued": queued_s() - self._began_queued}


def pieces_of(samples: Samples, layout: BatchLayout, rows: int, workers: int) -> int:
    """Return the number of tasks into which a batch is divided.

    Usually, each worker gets two tasks. A batch that needs no decoding may have fewer tasks, so that each task is worth
    its cost.
    """
    most = 2 * workers
    return min(most, 1 + rows * layout.row_bytes // _PIECE) if getattr(samples, "is_only_read", False) else most


class _OwnFile:
    """A thread's /proc/thread-self/schedstat, kept open: opening it takes as long as a batch of small records."""

    def __init__(self) -> None:
        self.thread, self.file = -1, -1

    def read(self) -> bytes:
        """Return the current content of the file.

        Raises:
            OSError: the system has no such file.
        """
        thread = threading.get_native_id()
        if thread != self.thread:
            # After a fork, `file` is a descriptor of the parent. Its number may belong to another file here, so do not
            # close it.
            self.file = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
            self.thread = thread
        return os.pread(self.file, 128, 0)

    # Both functions are default arguments, because the interpreter may have removed their modules when it exits.
    def __del__(
        self, close: Callable[[int], None] = os.close, own: Callable[[], int] = threading.get_native_id
    ) -> None:
        """Close the file when its thread has ended."""
        if self.file >= 0 and self.thread == own():
            close(self.file)


class _Own(threading.local):
    """Each thread's own file: opened at the thread's first use, and deleted when the thread ends."""

    def __init__(self) -> None:
        self.file = _OwnFile()


_own = _Own()


def queued_s() -> float:
    """Return how many seconds this thread has waited for a CPU core.

    The result is 0 if the system does not report this time.
    """
    try:
        return int(_own.file.read().split()[1]) * 1e-9
    except (OSError, IndexError, ValueError):
        return 0.0


def _filled_at_once(
    samples: Samples, layout: BatchLayout, rows: Mapping[str, Array], first: int, wanted: WantedSamples
) -> dict[str, list[Any]] | None:
    """Fill all rows by few calls and return the lists; return None if samples must be read one by one."""
    fills_rows = getattr(samples, "fills_rows", None)
    end = first + len(wanted.numbers)
    if fills_rows is None or end == first:
        return None
    try:
        found: dict[str, list[Any]] | None = fills_rows(
            wanted.numbers, {name: each[first:end] for name, each in rows.items()}
        )
    except (DataError, OSError):
        return None  # reading the samples one by one shows which sample fails
    return found if found is None or found.keys() == set(layout.lists) else None


def _cropped_at_once(
    samples: Samples, layout: BatchLayout, rows: Mapping[str, Array], first: int, wanted: WantedSamples
) -> dict[str, list[Any]] | None:
    """Decode crops into all rows by few calls; the result is that of `_filled_at_once`."""
    crops_rows, end = getattr(samples, "crops_rows", None), first + len(wanted.numbers)
    if crops_rows is None or end == first:
        return None
    lists: dict[str, list[Any]] = {name: [] for name in layout.lists}
    for begin in range(first, end, _CROPS):
        here = slice(begin, min(end, begin + _CROPS))
        part = wanted.piece(here.start - first, here.stop - first)
        draws = [part.draw(index) for index in range(len(part.numbers))]
        try:
            found = crops_rows(part.numbers, part.epoch, draws, {name: each[here] for name, each in rows.items()})
        except (DataError, OSError):
            return None
        if found is None or found.keys() != lists.keys():
            return None
        for name, values in found.items():
            lists[name] += values
    return lists


def _put(
    record: Mapping[str, Any],
    layout: BatchLayout,
    out: Mapping[str, Array],
    number: int,
    wider: dict[str, np.dtype[Any]],
) -> None:
    """Write a sample's row.

    If a field's type is too narrow for a value, put a wider type into `wider` instead.
    """
    if record.keys() != layout.arrays.keys() | set(layout.lists):
        raise DataError(
            f"sample {number} has the fields {sorted(record)}, but the first sample has "
            f"{sorted({*layout.arrays, *layout.lists})}; want the same fields in all samples"
        )
    if layout.empty or any(value is None for value in record.values()):
        _require_alike_empty(record, layout, number)
    for name, (shape, dtype) in layout.arrays.items():
        value = _as_array(record[name])
        if value.dtype == dtype and value.shape == shape:
            if not _is_same(value, out[name]):
                out[name][...] = value  # the usual case
            continue
        needed = widened(wider.get(name, dtype), value.dtype.newbyteorder("="))
        if value.shape != shape or needed is None:
            raise DataError(
                f"sample {number}: {name} is {value.dtype} {value.shape}, but in the first sample it is {dtype} "
                f"{shape}; a batch needs equal shapes: want a transform that crops or pads"
            )
        if needed != dtype:
            wider[name] = needed
        elif not put_exactly(out[name], value):
            raise DataError(
                f"sample {number}: {name} is {value.dtype}, but other samples need {dtype}, which does not hold all "
                "its values exactly: want a transform that gives all samples one type"
            )


def _require_alike_empty(record: Mapping[str, Any], layout: BatchLayout, number: int) -> None:
    """Raise DataError if a number is missing in this sample or in the first one, and not in the other."""
    for name in layout.empty:
        if _number_or_array(record[name]) is not None:
            raise DataError(
                f"sample {number}: {name} is {record[name]!r}, but the first sample has no value there (null, None): "
                f"{_FILLS}"
            )
    for name, (shape, dtype) in layout.arrays.items():
        if record[name] is None:
            raise DataError(
                f"sample {number}: {name} has no value (null, None), but in the first sample it is {dtype} {shape}: "
                f"{_FILLS}"
            )


def _is_same(value: Array, row: Array) -> bool:
    """Return whether a value of the row's type and shape is the row itself."""
    return value.strides == row.strides and value.ctypes.data == row.ctypes.data


def _as_array(value: Any) -> Array:
    """Return a value as an array; an array of objects if the value is not numeric."""
    if isinstance(value, np.ndarray):
        return value
    try:
        return np.asarray(value)
    except ValueError:  # nested lists of different lengths
        return np.empty((), object)


def wider_of(pieces: Iterable[Filled]) -> dict[str, np.dtype[Any]]:
    """Return the types that all pieces need for fields whose type is too narrow."""
    found: dict[str, np.dtype[Any]] = {}
    for piece in pieces:
        for name, dtype in piece.wider.items():
            # `widened` finds a type here, because each piece's type is already a widening of the layout's type.
            found[name] = widened(found.get(name, dtype), dtype) or dtype
    return found


@dataclass(kw_only=True, slots=True)
class BatchJob:
    """A batch that workers make in pieces."""

    wanted: WantedSamples
    arrays: dict[str, Array]
    slot: int = -1  # number of the batch's area of shared memory; -1 if it has none
    cancelled: bool = False
    error: BaseException | None = None
    _pieces: dict[int, Filled] = field(default_factory=dict)
    _left: int = 0
    _done: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def cut(self, count: int) -> list[tuple[int, int]]:
        """Divide the batch into at most `count` pieces.

        Call this once. It returns the first row of each piece, and the row after the piece's last row.
        """
        rows = len(self.wanted.numbers)
        size = max(1, -(-rows // count))
        pieces = [(begin, min(rows, begin + size)) for begin in range(0, rows, size)]
        self._left = len(pieces)
        if not pieces:
            self._done.set()
        return pieces

    def finish(self, first: int, filled: Filled) -> None:
        """Record that the piece from row `first` on is done."""
        with self._lock:
            self._pieces[first] = filled
            self._left -= 1
            if not self._left:
                self._done.set()

    def fail(self, error: BaseException) -> None:
        """Make `wait` raise `error`."""
        self.error = error
        self._done.set()

    def wider(self) -> dict[str, np.dtype[Any]]:
        """Return the wider types that a finished batch needs.

        If there are any, the batch must be made again with these types.
        """
        return wider_of(self._pieces.values())

    def is_done(self) -> bool:
        """Return whether the batch is finished or has failed."""
        return self._done.is_set()

    def spent(self) -> dict[str, float]:
        """Return the seconds that workers spent on the batch, by stage."""
        found: dict[str, float] = defaultdict(float)
        for piece in self._pieces.values():
            for name, each in piece.spent.items():
                found[name] += each
        return dict(found)

    def wait(self) -> tuple[dict[str, list[Any]], list[SampleFailure]]:
        """Wait for the batch, and return its lists and its unreadable samples.

        Raises:
            DataError: the batch cannot be made.
        """
        while not self._done.wait(1.0):  # short waits let Ctrl-C interrupt on all systems
            pass
        if self.error is not None:
            raise self.error
        pieces = [self._pieces[first] for first in sorted(self._pieces)]
        lists = {
            name: [each for piece in pieces for each in piece.lists[name]]
            for name in (pieces or [Filled(lists={}, failures=[])])[0].lists
        }
        return lists, [each for piece in pieces for each in piece.failures]


def wanted_by(samples: Samples, step: Step) -> WantedSamples:
    """Return the samples of a step on a rank.

    A rank without samples gets the step's first sample, with weight 0, because every rank must compute each step.
    """
    numbers, places = step.samples, step.places
    if not len(numbers):
        places = np.array([step.begin])
        numbers = samples.order.samples(step.epoch, places)
    repeats = isinstance(samples.order, WeightedOrder | MixtureOrder)
    return WantedSamples(epoch=step.epoch, numbers=numbers, places=places if repeats else None, begin=step.begin)


def batch_of(samples: Samples, step: Step) -> dict[str, Any]:
    """Make a step's batch on a rank in this thread, and return it.

    Raises:
        DataError: a sample cannot be read.
    """
    return made_of(samples, wanted_by(samples, step))


def made_of(samples: Samples, wanted: WantedSamples) -> dict[str, Any]:
    """Make a batch of samples in this thread, and return it.

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
