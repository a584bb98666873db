"""Packs: each sample is read alone, an array's numbers straight to where they are wanted."""

import json
from typing import Any

import numpy as np

from multiring.data.packing.manifest import Field, load_index, load_manifest
from multiring.data.readers.arrays import array_of, bytes_in
from multiring.data.readers.limits import damage_told, require_size
from multiring.data.readers.source import Image, Numbering, Opening, Record
from multiring.data.readers.storage import read


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
        self.shards = self.manifest.listed()
        self.numbering = Numbering(self.shards)
        self.digest = self.manifest.digest[:16]
        columns = np.cumsum([0, *(each.columns for each in self.manifest.fields)]).tolist()
        # A sample that lacks a field has it without bytes, which no array of a fixed shape is.
        self._is_fixed = all(each.kind == "number" or each.shape is not None for each in self.manifest.fields)
        self._fields = list(zip(self.manifest.fields, columns, strict=False))

    def record(self, number: int) -> Record:
        """Return a sample's fields; those it lacks are left out."""
        shard, _ = self.numbering.place(number)
        name = self.shards[shard].name
        row = self._index[number].tolist()
        found: Record = {}
        for field, column in self._fields:
            if field.kind == "number":
                found[field.name] = row[column]
                continue
            begin, size = row[column], row[column + 1]
            if size < 0:
                continue
            if field.shape is not None:
                array = np.empty(field.shape, field.dtype)
                self._storage.read_into(name, begin + field.header_bytes, bytes_in(array))
                found[field.name] = array
                continue
            what = f"{self._storage.url}/{name}: {field.name} of sample {number}"
            require_size(what, size, self._limits.record_bytes, "the limit of a record")
            found[field.name] = self._value(what, field, read(self._storage, name, begin, begin + size))
        return found

    def _value(self, what: str, field: Field, data: bytes) -> Any:
        if field.kind == "image":
            return Image(data)
        if field.kind == "array":
            return array_of(what, data, self._limits)
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
        return self.numbering.shards(numbers), first, last

    def record_into(self, number: int, out: dict[str, Any]) -> bool:
        """Fill `out`, arrays by field, with a sample; False where that cannot be, and nothing was read."""
        if not self._is_fixed or any(out[each.name].dtype != each.dtype for each, _ in self._fields if each.dtype):
            return False
        shard, _ = self.numbering.place(number)
        name = self.shards[shard].name
        row = self._index[number].tolist()
        for field, column in self._fields:
            if field.kind == "number":
                out[field.name][...] = row[column]
            else:
                self._storage.read_into(name, row[column] + field.header_bytes, bytes_in(out[field.name]))
        return True
