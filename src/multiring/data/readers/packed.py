"""Packs: each sample is read alone, an array's numbers straight to where they are wanted."""

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from multiring.data.packing.blocks import Blocks
from multiring.data.packing.manifest import Field, load_index, load_manifest
from multiring.data.permutation import Numbers
from multiring.data.readers.arrays import array_of, bytes_in
from multiring.data.readers.limits import damage_told, require_size
from multiring.data.readers.source import Image, Numbering, Opening, Record
from multiring.data.readers.storage import Tails, read

_CLOSE = 4096  # bytes behind an array that are read with it


def _number(field: Field, value: int) -> Any:
    """Return a number with the type that was packed."""
    if not field.dtype:
        return value
    return bool(value) if field.dtype == "bool" else np.dtype(field.dtype).type(value)


class PackedSource:
    """Samples of a pack."""

    format = "pack"
    reads_records = True

    def __init__(self, opening: Opening) -> None:
        self._storage, self._limits = opening.storage, opening.limits
        self.manifest = load_manifest(opening.storage, opening.limits)
        for shard in self.manifest.shards:
            size = opening.storage.size(shard.name)
            if size != shard.size_bytes:
                opening.report(
                    f"{opening.storage.url}/{shard.name} has {size} bytes, its manifest says {shard.size_bytes}"
                )
        self._index = load_index(opening.storage, self.manifest, opening.limits)
        # A cache verifies blocks itself; of what is read by the piece from afar, no check sum is.
        is_local = hasattr(opening.storage, "read_rows")
        self._blocks = Blocks(opening.storage, self.manifest, opening.limits) if is_local else None
        self.shards = self.manifest.listed()
        self._names = [each.name for each in self.shards]
        self.numbering = Numbering(self.shards)
        self.digest = self.manifest.digest[:16]
        columns = np.cumsum([0, *(each.columns for each in self.manifest.fields)]).tolist()
        # A sample that lacks a field has it without bytes, which no array of a fixed shape is.
        self._is_fixed = all(each.kind == "number" or each.shape is not None for each in self.manifest.fields)
        self._fixed = {each.name for each in self.manifest.fields if each.kind == "number" or each.shape is not None}
        # What is neither a number nor an array, but no image either, goes into a batch as it is.
        self._is_plain = all(
            each.kind in {"text", "json", "bytes"} for each in self.manifest.fields if each.name not in self._fixed
        )
        self._fields = list(zip(self.manifest.fields, columns, strict=False))

    def record(self, number: int) -> Record:
        """Return a sample's fields; those it lacks are left out."""
        shard, _ = self.numbering.place(number)
        name = self.shards[shard].name
        row = self._index[number].tolist()
        self._verify(np.array([number]))
        found: Record = {}
        for field, column in self._fields:
            if field.kind == "number":
                found[field.name] = _number(field, row[column])
                continue
            begin, size = row[column], row[column + 1]
            if size < 0:
                continue
            if field.shape is not None:
                array = np.empty(field.shape, field.dtype)
                self._storage.read_into(name, begin + field.header_bytes, bytes_in(array))
                found[field.name] = array
                continue
            found[field.name] = self.value(number, field, column)
        return found

    def value(self, number: int, field: Field, column: int) -> Any:
        """Return what a field of a sample holds, which is no array of a fixed shape."""
        name = self.shards[self.numbering.place(number)[0]].name
        begin, size = self._index[number, column : column + 2].tolist()
        self._verify(np.array([number]))
        what = f"{self._storage.url}/{name}: {field.name} of sample {number}"
        require_size(what, size, self._limits.record_bytes, "the limit of a record")
        return self._value(what, field, read(self._storage, name, begin, begin + size))

    def _value(self, what: str, field: Field, data: bytes) -> Any:
        if field.kind == "image":
            return Image(data)
        if field.kind == "array":
            array = array_of(what, data, self._limits)
            return array if array.ndim else array[()]  # a number; arrays without axes have a fixed shape
        with damage_told(what, ValueError, RecursionError):
            return data.decode() if field.kind == "text" else json.loads(data) if field.kind == "json" else data

    def spans(self, numbers: Any) -> tuple[Any, Any, Any]:
        """Return the shards of samples, and the first and last byte that each takes there; (n,) each."""
        rows = self._index[numbers]
        first, last = np.full(len(rows), np.iinfo(np.int64).max), np.full(len(rows), -1, np.int64)
        for field, column in self._fields:
            if field.kind == "number":
                continue
            begin, size = rows[:, column], rows[:, column + 1]
            there = size > 0
            first[there] = np.minimum(first[there], begin[there])
            last[there] = np.maximum(last[there], begin[there] + size[there] - 1)
        return self.numbering.shards_of(numbers), first, last

    def rows_into(self, numbers: Numbers, out: Mapping[str, Any]) -> dict[str, list[Any]] | None:
        """Fill rows of `out` with samples' numbers and arrays; return the other fields' values, a list for each.

        None where samples have to be read one by one, and nothing was read.

        Args:
            numbers: of the samples, (n,).
            out: arrays of n rows each by field, in C's order.
        """
        read_rows = getattr(self._storage, "read_rows", None)
        if read_rows is None or not self._is_plain or out.keys() != self._fixed:
            return None
        if not self._fits(out):
            return None
        rows = self._index[numbers]
        self._verify(numbers)
        if any((rows[:, column + 1] < 0).any() for each, column in self._fields if each.kind != "number"):
            return None
        arrays = [(field, column) for field, column in self._fields if field.shape is not None]
        others = [(field, column) for field, column in self._fields if field.name not in self._fixed]
        shards = self.numbering.shards_of(numbers)
        nothing = Tails.of_sizes(np.zeros(len(rows), np.int64))
        tails = Tails.of_sizes(self._tail_bytes(rows, arrays[-1:], others))
        for field, column in self._fields:
            if field.kind == "number":
                out[field.name][...] = rows[:, column]
        for field, column in arrays:
            memory = np.frombuffer(bytes_in(out[field.name]), np.uint8)
            behind = tails if field is arrays[-1][0] else nothing
            read_rows(self._names, shards, rows[:, column] + field.header_bytes, memory, behind)
        if not len(tails.memory):
            return {
                field.name: [self.value(number, field, column) for number in numbers.tolist()]
                for field, column in others
            }
        data = tails.memory.tobytes()
        lists: dict[str, list[Any]] = {}
        for field, column in others:
            firsts = tails.places[:-1] + self._behind(rows, arrays[-1], column)
            spans = zip(firsts.tolist(), (firsts + rows[:, column + 1]).tolist(), strict=True)
            lists[field.name] = self._values(numbers, field, [data[first:end] for first, end in spans])
        return lists

    def _values(self, numbers: Numbers, field: Field, each: list[bytes]) -> list[Any]:
        if field.kind == "text":
            try:
                return [data.decode() for data in each]
            except UnicodeDecodeError:
                pass  # below it is told of by its sample's number
        what = f"{self._storage.url}: {field.name} of sample"
        return [self._value(f"{what} {number}", field, data) for number, data in zip(numbers, each, strict=True)]

    @staticmethod
    def _behind(rows: Numbers, array: tuple[Field, int], column: int) -> Numbers:
        """Return how many bytes behind an array's end a field of the same sample begins, (n,)."""
        field, place = array
        size = math.prod(field.shape or ()) * np.dtype(field.dtype).itemsize
        found: Numbers = rows[:, column] - rows[:, place] - field.header_bytes - size
        return found

    def _tail_bytes(self, rows: Numbers, arrays: list[tuple[Field, int]], others: list[tuple[Field, int]]) -> Numbers:
        """Return how many bytes behind an array hold each sample's other fields, (n,); 0 where they stand apart."""
        if arrays and others:
            begins = np.stack([self._behind(rows, arrays[0], column) for _, column in others])
            ends = begins + np.stack([rows[:, column + 1] for _, column in others])
            if begins.min() >= 0 and ends.max() <= _CLOSE:
                found: Numbers = ends.max(0)
                return found
        return np.zeros(len(rows), np.int64)

    def _verify(self, numbers: Numbers) -> None:
        if self._blocks is not None and not self._blocks.are_all_verified:
            self._blocks.verify(*self.spans(numbers))

    def _fits(self, out: Mapping[str, Any]) -> bool:
        """Return whether arrays have the types that the pack has: else values have to be compared one by one."""
        return all(
            out[each.name].dtype == (np.dtype(each.dtype or np.int64))
            for each, _ in self._fields
            if each.kind == "number" or each.shape is not None
        )

    def record_into(self, number: int, out: dict[str, Any]) -> bool:
        """Fill `out`, arrays by field, with a sample; False where that cannot be, and nothing was read."""
        if not self._is_fixed or out.keys() != self._fixed or not self._fits(out):
            return False
        shard, _ = self.numbering.place(number)
        name = self.shards[shard].name
        row = self._index[number].tolist()
        self._verify(np.array([number]))
        for field, column in self._fields:
            if field.kind == "number":
                out[field.name][...] = row[column]
            else:
                self._storage.read_into(name, row[column] + field.header_bytes, bytes_in(out[field.name]))
        return True
