"""Parquet: columns of samples, read by pyarrow."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from multiring._forks import ForkSafeLock
from multiring.data.readers.limits import damage_told, library, require_size
from multiring.data.readers.source import Image, Numbering, Opening, Record, Shard, digest_of
from multiring.data.readers.storage import StorageFile, with_endings
from multiring.errors import DataError

_KEPT_GROUPS = 4
_LEAST_ROWS, _MOST_ROWS = 64, 1 << 16  # rows decoded at a time if a group may need more memory than its declared size
_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 12, "FLOAT": 4, "DOUBLE": 8}
_BOUNDED = {"PLAIN", "RLE", "BIT_PACKED", "DELTA_LENGTH_BYTE_ARRAY"}  # encodings of bytes that do not grow in decoding

Reads = Callable[[Any], Any]  # converts a scalar of pyarrow to a field's value


class ParquetSource:
    """Rows of Parquet files. A shard is a row group, which is read as a whole.

    Numbers become NumPy scalars of the column's type, and lists of numbers become arrays of this type. Other lists and
    maps become Python lists. A struct of `bytes` and `path`, as in Hugging Face's data sets, becomes an image.
    """

    format = "parquet"
    reads_records = False

    def __init__(self, opening: Opening) -> None:
        self._storage, self._limits = opening.storage, opening.limits
        self._groups: list[tuple[str, int]] = []
        self.shards: list[Shard] = []
        names = with_endings(opening.names, ".parquet") or ([""] if opening.names == ("",) else [])
        for name in names:
            self._add(name)
        if not self.shards:
            raise DataError(f"{opening.storage.url} has no .parquet file with rows")
        self.numbering = Numbering(self.shards)
        self.digest = digest_of(self.format, self.shards)
        self.__setstate__({})

    def _file(self, name: str, dictionaries: Sequence[str] = ()) -> Any:
        """Open a file, with limits for the sizes that its Thrift metadata declare.

        Args:
            name: the file's name.
            dictionaries: the columns that stay dictionary-encoded.
        """
        parquet = library("pyarrow.parquet")
        size = self._storage.size(name)
        most = min(size, self._limits.index_bytes)
        with damage_told(f"{self._storage.url}/{name}", *_arrows_errors()):
            return parquet.ParquetFile(
                StorageFile(self._storage, name),
                thrift_string_size_limit=max(most, 1),
                thrift_container_size_limit=max(most, 1),
                pre_buffer=False,
                read_dictionary=list(dictionaries),
            )

    def _add(self, name: str) -> None:
        what = f"{self._storage.url}/{name}"
        with damage_told(what, *_arrows_errors()):
            file = self._file(name)
            names = file.schema_arrow.names
            if len(set(names)) < len(names):
                raise ValueError(f"columns {sorted(names)}: several have one name; want a different name for each")
            told = file.metadata
            for number in range(told.num_row_groups):
                group = told.row_group(number)
                where = f"{what}: row group {number}"
                require_size(where, group.total_byte_size, self._limits.group_bytes, "the limit of a row group")
                if not 0 <= group.num_rows <= self._limits.samples:
                    raise ValueError(f"row group {number} claims {group.num_rows} rows")
                if group.num_rows:
                    self._groups.append((name, number))
                    shard = Shard(name=f"{name}#{number}", size_bytes=group.total_byte_size, samples=group.num_rows)
                    self.shards.append(shard)

    def record(self, number: int) -> Record:
        """Return a row's values by column.

        Raises:
            DataError: a value cannot be read, or its type is not supported.
        """
        shard, row = self.numbering.place(number)
        table, reads = self._table(shard)
        name, group = self._groups[shard]
        found: Record = {}
        for column, values, read in zip(table.column_names, table.columns, reads, strict=True):
            what = f"{self._storage.url}/{name}: row {row} of group {group}: column {column}"
            with damage_told(what, *_arrows_errors()):
                found[column] = read(values[row])
        return found

    def _table(self, shard: int) -> tuple[Any, list[Reads]]:
        with self._lock:
            found = self._kept.get(shard)
            if found is None:
                name, number = self._groups[shard]
                with damage_told(f"{self._storage.url}/{name}: row group {number}", *_arrows_errors()):
                    table = self._unpacked(name, number)
                    table.validate()
                if table.num_rows != self.shards[shard].samples:
                    raise DataError(f"{self._storage.url}/{self.shards[shard].name} has {table.num_rows} rows")
                found = self._kept[shard] = (table, [_reads(each.type) for each in table.schema])
            self._kept.move_to_end(shard)
            while len(self._kept) > _KEPT_GROUPS:
                self._kept.popitem(last=False)
            return found

    def _unpacked(self, name: str, number: int) -> Any:
        """Return a row group as a table that needs at most `limits.group_bytes` of memory.

        A few bytes can encode any number of values, for instance in a dictionary or as a repeated number. If the
        decoded group could exceed the limit, columns stay dictionary-encoded, and the group is decoded in pieces. An
        error is raised as soon as the pieces exceed the limit.

        Raises:
            ValueError: the row group needs more memory.
        """
        file, most = self._file(name), self._limits.group_bytes
        group = file.metadata.row_group(number)
        columns = [group.column(each) for each in range(group.num_columns)]
        if sum(map(_most_bytes, columns)) <= most:
            return file.read_row_group(number, use_threads=False)
        kept = [each.path_in_schema for each in columns if each.physical_type == "BYTE_ARRAY"]
        file = self._file(name, [path for path in kept if "." not in path])
        largest = max(1, *(each.total_uncompressed_size for each in columns))
        rows = min(max(most // largest, _LEAST_ROWS), _MOST_ROWS)
        pieces, taken = [], 0
        for batch in file.iter_batches(batch_size=rows, row_groups=[number], use_threads=False):
            taken += sum(_taken_bytes(column) for column in batch.columns)
            if taken > most:
                raise ValueError(f"it takes more than {most} bytes, the limit of a row group")
            pieces.append(batch)
        return library("pyarrow").Table.from_batches(pieces, schema=file.schema_arrow)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_kept": None, "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        self._kept: OrderedDict[int, tuple[Any, list[Reads]]] = OrderedDict()
        self._lock = ForkSafeLock(reentrant=True)


def _arrows_errors() -> tuple[type[BaseException], ...]:
    return (library("pyarrow").ArrowException, OSError, ValueError, OverflowError, KeyError, TypeError)


def _taken_bytes(column: Any) -> int:
    # Batches of one group share the dictionary, so only the indices count.
    is_dictionary = library("pyarrow.types").is_dictionary(column.type)
    return int(column.indices.nbytes if is_dictionary else column.nbytes)


def _most_bytes(column: Any) -> int:
    """Return an upper bound for the decoded bytes of a column chunk."""
    width = _WIDTHS.get(column.physical_type)
    if width is not None:
        return int(column.num_values * width + column.total_uncompressed_size)
    if set(column.encodings) <= _BOUNDED:
        return int(8 * column.num_values + column.total_uncompressed_size)
    return int(column.num_values * column.total_uncompressed_size)


def _reads(kind: Any) -> Reads:
    """Return the function that converts a scalar of a column of this type."""
    pyarrow: Any = library("pyarrow")
    types: Any = library("pyarrow.types")
    if types.is_dictionary(kind):
        return _within(_reads(kind.value_type))
    if isinstance(kind, pyarrow.FixedShapeTensorType):
        return lambda scalar: scalar.to_numpy() if scalar.is_valid else None
    if isinstance(kind, pyarrow.BaseExtensionType):
        return _within(_reads(kind.storage_type))
    number = _number_of(kind)
    if number is not None:
        return lambda scalar: _scalar(scalar, number)
    is_list = _depth_and_leaf(kind) is not None
    return _list if is_list else _struct if types.is_struct(kind) else lambda scalar: scalar.as_py()


def _within(read: Reads) -> Reads:
    return lambda scalar: read(scalar.value) if scalar.is_valid else None


_FLOATS = {"halffloat": "float16", "float": "float32", "double": "float64"}  # all other types have NumPy's names


def _number_of(kind: Any) -> Any:
    """Return NumPy's type of a column of numbers, times or time spans; None for any other column."""
    types: Any = library("pyarrow.types")
    if types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind):
        # Older releases of pyarrow need pandas for to_pandas_dtype.
        return np.dtype(_FLOATS.get(str(kind), str(kind)))
    if (types.is_timestamp(kind) and kind.tz is None) or types.is_duration(kind):
        return np.dtype(f"{'M' if types.is_timestamp(kind) else 'm'}8[{kind.unit}]")
    return None


def _scalar(scalar: Any, dtype: np.dtype[Any]) -> Any:
    if not scalar.is_valid:
        return None
    if dtype.kind in "mM":
        return dtype.type(scalar.value, np.datetime_data(dtype)[0])
    return dtype.type(scalar.as_py())


def _struct(scalar: Any) -> Any:
    value = scalar.as_py()
    if isinstance(value, dict) and set(value) == {"bytes", "path"} and value["bytes"] is not None:
        return Image(value["bytes"])
    return value


def _depth_and_leaf(kind: Any) -> tuple[int, np.dtype[Any]] | None:
    """Return the nesting depth of lists of numbers, and the numbers' type; None if `kind` is another type."""
    types: Any = library("pyarrow.types")
    depth = 0
    while types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        depth, kind = depth + 1, kind.value_type
    leaf = _number_of(kind)
    return None if not depth or leaf is None else (depth, leaf)


def _list(scalar: Any) -> Any:
    """Return a list of numbers as an array; return nested lists of different lengths as a list of arrays.

    Raises:
        ValueError: a number is missing.
    """
    if not scalar.is_valid:
        return None
    values = scalar.values
    if values.null_count:
        raise ValueError("it has a list with missing values, which an array cannot hold: want a column without them")
    leaf = _number_of(values.type)
    if leaf is not None:
        if leaf.kind == "b":
            return np.array(values.to_pylist(), leaf)
        return np.array(values.to_numpy(zero_copy_only=False)).astype(leaf, copy=False)
    found = [_list(each) for each in values]
    if not found:
        found_depth = _depth_and_leaf(scalar.type)
        depth, kind = found_depth if found_depth is not None else (1, np.dtype(float))
        return np.empty((0,) * depth, kind)
    is_regular = all(isinstance(each, np.ndarray) and each.shape == found[0].shape for each in found)
    return np.stack(found) if is_regular else found
