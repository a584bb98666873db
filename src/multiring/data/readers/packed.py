"""Read packs: each sample can be read alone, and arrays are read directly into a batch."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from operator import add
from typing import Any

import numpy as np

from multiring.data.permutation import Numbers
from multiring.data.readers.arrays import array_of, bytes_in
from multiring.data.readers.limits import damage_told, require_size
from multiring.data.readers.manifest import Field, load_index, load_manifest
from multiring.data.readers.source import Image, Numbering, Opening, Record
from multiring.data.readers.storage import Tails, read
from multiring.data.readers.verified_blocks import Blocks

_TEXTS = ("text", "json", "bytes")
_NOTHING = np.empty(0, np.uint8)
_CLOSE = 4096  # the most bytes beside the wanted fields of a sample that are read together with them
_LOOKED_AT = 1024  # samples whose sizes stand for those of all


def _number(field: Field, value: int) -> Any:
    """Return a number with the type that the field had when it was packed."""
    if not field.dtype:
        return value
    return bool(value) if field.dtype == "bool" else np.dtype(field.dtype).type(value)


class PackedSource:
    """The samples of a pack."""

    format = "pack"
    reads_records = True

    def __init__(self, opening: Opening) -> None:
        self._storage, self._limits = opening.storage, opening.limits
        self.manifest = load_manifest(opening.storage, opening.limits)
        for shard in self.manifest.shards:
            size = opening.storage.size(shard.name)
            if size != shard.size_bytes:
                opening.report(
                    f"{opening.storage.url}/{shard.name} has {size} bytes, but its manifest says {shard.size_bytes}"
                )
        self._index = load_index(opening.storage, self.manifest, opening.limits)
        # Only local packs are verified here. A cache verifies its blocks itself, and parts of blocks that are read from
        # a remote source have no check sum.
        self._is_local = hasattr(opening.storage, "read_rows")
        self._blocks = Blocks(opening.storage, self.manifest, opening.limits) if self._is_local else None
        self._are_images_sound = self.manifest.decoded and self._is_local
        self.shards = self.manifest.listed()
        self._names = [each.name for each in self.shards]
        self.numbering = Numbering(self.shards)
        self.digest = self.manifest.digest[:16]
        columns = np.cumsum([0, *(each.columns for each in self.manifest.fields)]).tolist()
        # A sample can lack a field, unless the field is a number or an array of fixed shape.
        self._is_fixed = all(each.kind == "number" or each.shape is not None for each in self.manifest.fields)
        self._fixed = {each.name for each in self.manifest.fields if each.kind == "number" or each.shape is not None}
        # Whether all other fields are text, JSON or bytes: images must be decoded before they go into a batch.
        self._is_plain = all(each.kind in _TEXTS for each in self.manifest.fields if each.name not in self._fixed)
        self._fields = list(zip(self.manifest.fields, columns, strict=False))

    def record(self, number: int) -> Record:
        """Return the fields that a sample has."""
        shard, _ = self.numbering.place(number)
        name = self.shards[shard].name
        row = self._index[number].tolist()
        self._verify_row(number, shard, row)
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
            found[field.name] = self._read(number, name, field, begin, size)
        return found

    def together(
        self, image: str, numbers: Numbers, out: Mapping[str, Any] | None, take: Callable[[int], memoryview]
    ) -> dict[str, Sequence[Any]] | None:
        """Read samples by one call, and their images into memory that is reused.

        New memory for each image costs more time than the copy into it.

        Args:
            image: the field of the images.
            numbers: the samples' numbers, (n,).
            out: an array of n rows in C order for each field that is a number; None to return numbers, too.
            take: returns memory of so many bytes.

        Returns:
            The n values of each field without an array; None if the samples must be read one by one.
        """
        if not self._is_local or (out is not None and (out.keys() != self._fixed or not self._fits(out))):
            return None
        stored = [(field, column) for field, column in self._fields if field.kind != "number"]
        if not stored or any(
            field.kind not in _TEXTS and (field.name, field.kind) != (image, "image") for field, _ in stored
        ):
            return None
        rows = self._index[numbers]
        begins = np.stack([rows[:, column] for _, column in stored])
        sizes = np.stack([rows[:, column + 1] for _, column in stored])
        first, end = begins.min(0), (begins + sizes).max(0)
        if sizes.min() < 0 or (end - first - sizes.sum(0)).max() > _CLOSE or sizes.max() > self._limits.record_bytes:
            return None
        self._verify(numbers)
        places = np.zeros(len(rows) + 1, np.int64)
        np.cumsum(end - first, out=places[1:])
        memory = take(int(places[-1]))
        spans = Tails(np.frombuffer(memory, np.uint8), places)
        storage: Any = self._storage
        storage.read_rows(self._names, self.numbering.shards_of(numbers), first, _NOTHING, spans)
        found: dict[str, Sequence[Any]] = {}
        for field, column in self._fields:
            if field.kind == "number" and out is not None:
                out[field.name][...] = rows[:, column]
            elif field.kind == "number":
                found[field.name] = [_number(field, value) for value in rows[:, column].tolist()]
            else:
                at = (rows[:, column] - first + places[:-1]).tolist()
                ends = map(add, at, rows[:, column + 1].tolist())
                data = [memory[begin:end] for begin, end in zip(at, ends, strict=True)]
                found[field.name] = (
                    [Image(each, self._are_images_sound) for each in data]
                    if field.kind == "image"
                    else self._values(numbers, field, [bytes(each) for each in data])
                )
        return found

    def value(self, number: int, field: Field, column: int) -> Any:
        """Return a sample's value of a field.

        The field must be neither a number nor an array of fixed shape.
        """
        name = self.shards[self.numbering.place(number)[0]].name
        begin, size = self._index[number, column : column + 2].tolist()
        self._verify(np.array([number]))
        return self._read(number, name, field, begin, size)

    def _read(self, number: int, name: str, field: Field, begin: int, size: int) -> Any:
        what = self._named(number, name, field)
        require_size(what, size, self._limits.record_bytes, "the limit of a record")
        return self._value(what, field, read(self._storage, name, begin, begin + size))

    def _named(self, number: int, name: str, field: Field) -> str:
        return f"{self._storage.url}/{name}: {field.name} of sample {number}"

    def _value(self, what: str, field: Field, data: bytes) -> Any:
        if field.kind == "image":
            return Image(data, self._are_images_sound)
        if field.kind == "array":
            array = array_of(what, data, self._limits)
            return array if array.ndim else array[()]  # without axes, the value is a number, not an array
        with damage_told(what, ValueError, RecursionError):
            return data.decode() if field.kind == "text" else json.loads(data) if field.kind == "json" else data

    @property
    def listed_bytes(self) -> float | None:
        """Return the mean bytes of a sample's values that `rows_into` returns in lists; None if it reads no samples."""
        if not hasattr(self._storage, "read_rows") or not self._is_plain:
            return None
        columns = [column + 1 for field, column in self._fields if field.name not in self._fixed]
        if not columns:
            return 0.0
        some = self._index[:: max(1, len(self._index) // _LOOKED_AT)][:, columns]
        return float(np.maximum(some, 0).sum(axis=1).mean())

    def spans(self, numbers: Any) -> tuple[Any, Any, Any]:
        """Return samples' shards, and their first and last bytes there; (n,) each."""
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
        """Read the numbers and arrays of samples into the rows of `out`.

        Args:
            numbers: the samples' numbers, (n,).
            out: an array of n rows in C order for each field that is a number or an array.

        Returns:
            A list of values for each other field. None if the samples must be read one by one; the function has then
            read nothing.
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
                pass  # the loop below raises an error that names the sample
        what = f"{self._storage.url}: {field.name} of sample"
        return [self._value(f"{what} {number}", field, data) for number, data in zip(numbers, each, strict=True)]

    @staticmethod
    def _behind(rows: Numbers, array: tuple[Field, int], column: int) -> Numbers:
        """Return the number of bytes from an array's end to the next field of the same sample, (n,)."""
        field, place = array
        size = math.prod(field.shape or ()) * np.dtype(field.dtype).itemsize
        found: Numbers = rows[:, column] - rows[:, place] - field.header_bytes - size
        return found

    def _tail_bytes(self, rows: Numbers, arrays: list[tuple[Field, int]], others: list[tuple[Field, int]]) -> Numbers:
        """Return the number of bytes behind an array that hold each sample's other fields, (n,).

        The results are all 0 if some field is farther than `_CLOSE` bytes from its array.
        """
        if arrays and others:
            begins = np.stack([self._behind(rows, arrays[0], column) for _, column in others])
            ends = begins + np.stack([rows[:, column + 1] for _, column in others])
            if begins.min() >= 0 and ends.max() <= _CLOSE:
                found: Numbers = ends.max(0)
                return found
        return np.zeros(len(rows), np.int64)

    def _verify_row(self, number: int, shard: int, row: list[int]) -> None:
        """Verify the blocks of one sample. If they are verified already, this is much faster than `_verify`."""
        if self._blocks is None or self._blocks.are_all_verified:
            return
        spans = [row[column : column + 2] for field, column in self._fields if field.kind != "number"]
        stored = [(begin, begin + size) for begin, size in spans if size > 0]
        if stored and not self._blocks.holds(shard, min(stored)[0], max(end for _, end in stored) - 1):
            self._verify(np.array([number]))

    def _verify(self, numbers: Numbers) -> None:
        if self._blocks is not None and not self._blocks.are_all_verified:
            self._blocks.verify(*self.spans(numbers))

    def _fits(self, out: Mapping[str, Any]) -> bool:
        """Return whether arrays have the pack's types.

        If not, values must be converted and compared one by one.
        """
        return all(
            out[each.name].dtype == (np.dtype(each.dtype or np.int64))
            for each, _ in self._fields
            if each.kind == "number" or each.shape is not None
        )

    def record_into(self, number: int, out: dict[str, Any]) -> bool:
        """Read a sample into `out`, a map from fields to arrays.

        Returns:
            Whether the sample was read; False if a field is neither a number nor an array with the shape and type of
            its array in `out`.
        """
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
