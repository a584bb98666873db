"""Read random files of every format.

Other libraries wrote the files, or this module wrote them by the format's specification.
"""

import bz2
import gzip
import io
import json
import lzma
import re
import struct
import subprocess
import sys
import tarfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from benchmarks.evidence.data_files.values import (
    FLOATS,
    INTEGERS,
    NUMBERS,
    add_file,
    array_of,
    bytes_of,
    chosen,
    framed,
    npy_of,
    same,
    shape_of,
    text_of,
    told,
)
from benchmarks.evidence.support.cases import Family, Fault, Random
from PIL import Image as Pillow

from multiring.data import Dataset
from multiring.errors import DataError

# ---- Parquet ----

_ARROW = {"?": "bool", **{each: f"{'u' if each[0] == 'u' else ''}int{8 * int(each[1])}" for each in INTEGERS}}
_ARROW |= {"f2": "halffloat", "f4": "float", "f8": "double"}


def column_of(random: Random, rows: int) -> tuple[str, Any]:
    """Return the kind of a random column, and the column as an Arrow array."""
    kind = chosen(random, NUMBERS)
    arrow = pa.type_for_alias(_ARROW[kind])
    lengths = random.integers(0, 4, size=rows).tolist()
    if random.random() < 0.4:
        lengths = [3] * rows
    numbers = [array_of(random, kind, (length,)).tolist() for length in lengths]
    names = ("number", "list", "list", "nested", "fixed", "map", "text", "bytes", "texts", "blobs", "struct")
    sort = chosen(random, names)
    if sort in {"text", "bytes"}:
        texts = [text_of(random) if sort == "text" else bytes_of(random) for _ in range(rows)]
        made = pa.array(texts, pa.string() if sort == "text" else pa.binary())
        return sort, made.dictionary_encode() if random.random() < 0.3 else made
    if sort in {"texts", "blobs"}:
        draw = text_of if sort == "texts" else bytes_of
        words = [[draw(random) for _ in range(length)] for length in lengths]
        return "list", pa.array(words, pa.list_(pa.string() if sort == "texts" else pa.binary()))
    made_of: dict[str, tuple[list[Any], Any]] = {
        "number": (array_of(random, kind, (rows,)).tolist(), arrow),
        "list": (numbers, chosen(random, (pa.list_, pa.large_list))(arrow)),
        "fixed": ([array_of(random, kind, (2,)).tolist() for _ in range(rows)], pa.list_(arrow, 2)),
        "nested": ([[each, each[:1]] for each in numbers], pa.list_(pa.list_(arrow))),
        "map": ([[(f"k{number}", each) for number, each in enumerate(row)] for row in numbers], None),
        "struct": (
            [{"x": row[0] if row else array_of(random, kind, ()).item(), "y": text_of(random)} for row in numbers],
            None,
        ),
    }
    made_of["map"] = (made_of["map"][0], pa.map_(pa.string(), arrow))
    made_of["struct"] = (made_of["struct"][0], pa.struct([("x", arrow), ("y", pa.string())]))
    return {"nested": "list", "fixed": "list"}.get(sort, sort), pa.array(*made_of[sort])


def wanted_of(kind: Any, value: Any) -> Any:
    """Return a pyarrow value as multiring should return it.

    Numbers become NumPy scalars, and lists of numbers become arrays.
    """
    if pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return np.dtype(kind.to_pandas_dtype()).type(value)
    leaf, depth = kind, 0
    while pa.types.is_list(leaf) or pa.types.is_large_list(leaf) or pa.types.is_fixed_size_list(leaf):
        leaf, depth = leaf.value_type, depth + 1
    if not depth or not (pa.types.is_boolean(leaf) or pa.types.is_integer(leaf) or pa.types.is_floating(leaf)):
        return value
    dtype = np.dtype(leaf.to_pandas_dtype())
    if depth == 1:
        return np.array(value, dtype)
    inner = [np.array(each, dtype) for each in value]
    return np.stack(inner) if len({each.shape for each in inner}) == 1 else inner


def parquet(random: Random, folder: Path) -> Iterator[Fault]:
    """Read Parquet tables that pyarrow wrote."""
    rows = int(random.integers(1, 9))
    drawn = [column_of(random, rows) for _ in range(int(random.integers(1, 4)))]
    table = pa.table({f"c{number}": array for number, (_, array) in enumerate(drawn)})
    compression = chosen(random, ("none", "snappy", "zstd", "gzip"))
    size = int(random.integers(1, rows + 1))
    pq.write_table(table, folder / "a.parquet", row_group_size=size, compression=compression)
    wanted = pq.read_table(folder / "a.parquet")
    data = Dataset(folder, shuffle="none")
    for row in range(rows):
        record = data[row]
        for number, (sort, _) in enumerate(drawn):
            name = f"c{number}"
            kind = wanted.schema.field(name).type
            kind = kind.value_type if pa.types.is_dictionary(kind) else kind
            value = wanted_of(kind, wanted[name][row].as_py())
            if not same(record[name], value, types=False):
                yield Fault(f"parquet: a {sort} has other values", f"{kind}: {told(record[name])}, want {told(value)}")
            elif not same(record[name], value):
                yield Fault(f"parquet: a {sort} has another type", f"{kind}: {told(record[name])}, want {told(value)}")


# ---- HDF5 ----

_FED = """
import sys
from multiring.data import Dataset, Loader
loader = Loader(Dataset(sys.argv[1]), 3, workers=int(sys.argv[2]))
print(sum(len(batch) for batch in loader))
if sys.argv[3] == "close":
    loader.close()
"""


def hdf5(random: Random, folder: Path) -> Iterator[Fault]:
    """Read HDF5 data sets that h5py wrote; a program that reads them must exit well."""
    rows = int(random.integers(2, 9))
    path = folder / "a.h5"
    bad: set[int] = set()
    with h5py.File(path, "w") as file:
        for number in range(int(random.integers(1, 4))):
            sort = chosen(random, ("numbers", "numbers", "record", "text", "fixed text"))
            name = f"{sort.replace(' ', '_')}{number}"
            if sort in {"numbers", "record"}:
                order = chosen(random, "<>")
                dtype: Any = np.dtype(chosen(random, ("c8", "c16", *NUMBERS))).newbyteorder(order)
                if sort == "record":
                    dtype = np.dtype([("id", f"{order}i4"), ("value", chosen(random, FLOATS)), ("flag", "u1")])
                shape = shape_of(random) if sort == "numbers" else ()
                options = chosen(random, ({}, {"compression": "gzip", "shuffle": True}, {"chunks": True}))
                file.create_dataset(name, data=array_of(random, dtype, (rows, *shape)), **options)
                continue
            words = [text_of(random).replace("\0", "").encode() for _ in range(rows)]
            if random.random() < 0.5:
                for row in random.integers(rows, size=2).tolist():
                    words[row] = b"caf\xff" + bytes_of(random).replace(b"\0", b"")
                    bad.add(row)
            kind = h5py.string_dtype(chosen(random, ("ascii", "utf-8")), 40 if sort == "fixed text" else None)
            file.create_dataset(name, data=words, dtype=kind)
    data = Dataset(folder, shuffle="none")
    with h5py.File(path, "r") as file:
        yield from _hdf5_rows(file, data, rows, bad)
    if random.random() < 0.25:
        arguments = [str(folder), str(random.integers(1, 3)), chosen(random, ("close", "leave"))]
        if bad:
            return
        done = subprocess.run(  # noqa: S603 -- our own
            [sys.executable, "-c", _FED, *arguments], capture_output=True, text=True, timeout=50, check=False
        )
        if done.returncode:
            yield Fault(
                "hdf5: a program that fed it did not end well", f"exit code {done.returncode}: {done.stderr[-300:]}"
            )


def _hdf5_rows(file: Any, data: Dataset, rows: int, bad: set[int]) -> Iterator[Fault]:
    for row in range(rows):
        try:
            record = data[row]
        except DataError as error:
            if row not in bad or "a.h5" not in str(error) or f"sample {row}" not in str(error):
                yield Fault("hdf5: an error that names no sample", f"row {row}: {error}")
            continue
        except UnicodeDecodeError as error:
            yield Fault("hdf5: a text raised what is no DataError", f"row {row}: {error!r}")
            continue
        for name in file:
            value = file[name][row]
            value = value.decode("utf-8", "replace") if isinstance(value, bytes) else value
            if not same(record[name], value, types=isinstance(value, np.void)) and row not in bad:
                sort = name.rstrip("0123456789")
                yield Fault(f"hdf5: {sort} come as others", f"{told(record[name])}, want {told(value)}")
        if row in bad:
            yield Fault("hdf5: a text that is not UTF-8 was read", f"{record}")


# ---- tar ----

_ENDINGS = ("npy", "cls", "txt", "json", "bin", "id", "seg.npy", "TXT", "class", "jsn", "text", "count")
_PATHS = ("{}", "{}", "dir/{}", "./{}", "a.b/{}")
_TAR_NAME = re.compile(r"^((?:.*/|)[^.]+)[.]([^/]*)$")  # the same pattern as WebDataset's base_plus_ext


def member_of(random: Random, ending: str) -> tuple[bytes, Any]:
    """Return the bytes of a file with this ending, and the value that they encode."""
    last = ending.lower().rpartition(".")[2]
    if last == "npy":
        dtype = np.dtype(chosen(random, ("c8", "c16", *NUMBERS))).newbyteorder(chosen(random, "<>"))
        array = array_of(random, dtype, shape_of(random))
        array = np.asfortranarray(array) if random.random() < 0.3 else array
        return npy_of(array), array
    if last in {"cls", "id", "class", "count"}:
        number = int(random.integers(-9, 1 << 40)) * (10**30 if random.random() < 0.1 else 1)
        return str(number).encode(), number
    if last in {"txt", "text"}:
        words = text_of(random)
        return words.encode(), words
    if last in {"json", "jsn"}:
        value = {"a": [int(random.integers(9)), text_of(random)], "b": None}
        return json.dumps(value).encode(), value
    data = bytes_of(random)
    return data, data


def tar_of(random: Random, path: Path, count: int) -> list[dict[str, Any]]:
    """Write a random shard with `tarfile`; return its samples by WebDataset's rules.

    The whole shard may be compressed.
    """
    plain = io.BytesIO()
    samples: list[dict[str, Any]] = []
    endings = list(random.choice(_ENDINGS, size=int(random.integers(1, 4)), replace=False))
    endings = [each for number, each in enumerate(endings) if each.lower() not in {e.lower() for e in endings[:number]}]
    with tarfile.open(fileobj=plain, mode="w", format=chosen(random, (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT))) as tar:
        for number in range(count):
            where = chosen(random, _PATHS).format(f"{number:05}")
            names = [f"{where}.{ending}" for ending in random.permutation(endings)]
            others = (f"dir/readme{number}", f"._{number:05}.txt", "__meta__/x.json", f"LICENSE{number}", "__info__")
            for name in [*names, *random.permutation(others)[: int(random.random() < 0.4)]]:
                data, value = member_of(random, name)
                add_file(tar, str(name), data)
                found = _TAR_NAME.match(str(name))
                if found is None or re.match(r"__[^/]*__($|/)", str(name)):
                    continue
                if not samples or samples[-1]["key"] != found[1]:
                    samples.append({"key": found[1]})
                samples[-1][found[2].lower()] = value
    packers: Mapping[str, Any] = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}
    how = chosen(random, ("", "", *packers))
    # The name of a compressed shard often has no ending for the compression.
    Path(f"{path}{how if random.random() < 0.7 else ''}").write_bytes(packers[how](plain.getvalue()))
    return samples


def tars(random: Random, folder: Path) -> Iterator[Fault]:
    """Read shards that `tarfile` wrote."""
    wanted = [tar_of(random, folder / f"{shard}.tar", int(random.integers(1, 6))) for shard in range(2)]
    data = Dataset(folder, shuffle="none", decode=False)
    flat = [each for shard in wanted for each in shard]
    if len(data) != len(flat):
        yield Fault("tar: other samples than WebDataset's", f"{[data[i] for i in range(len(data))]}, want {flat}")
        return
    for number, value in enumerate(flat):
        if not same(data[number], value):
            yield Fault("tar: a sample has other values", f"{data[number]}, want {value}")


# ---- TFRecord ----


def _varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    out = b""
    while value > 127:
        out += bytes([value & 127 | 128])
        value >>= 7
    return out + bytes([value])


def _message(field: int, data: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(data)) + data


def feature_of(random: Random) -> tuple[bytes, Any]:
    """Return the bytes of a random Feature, packed or not, and its value."""
    count = int(random.integers(0, 5))
    sort, is_packed = int(random.integers(1, 4)), random.random() < 0.6
    if sort == 1:
        blobs = [bytes_of(random) for _ in range(count)]
        return _message(1, b"".join(_message(1, each) for each in blobs)), blobs[0] if count == 1 else blobs
    if sort == 2:
        floats = array_of(random, "<f4", (count,))
        inner = _message(1, floats.tobytes()) if is_packed else b"".join(b"\x0d" + each.tobytes() for each in floats)
        return _message(2, inner), floats[0] if count == 1 else floats
    whole = array_of(random, "<i8", (count,))
    inner = b"".join((b"" if is_packed else b"\x08") + _varint(int(each)) for each in whole)
    return _message(3, _message(1, inner) if is_packed else inner), whole[0] if count == 1 else whole


def tfrecords(random: Random, folder: Path) -> Iterator[Fault]:
    """Read examples written by the specifications of TensorFlow and protobuf."""
    wanted, records = [], b""
    for _ in range(int(random.integers(1, 6))):
        names = [f"f{number}" for number in range(int(random.integers(1, 4)))]
        features = {name: feature_of(random) for name in names}
        entries = [_message(1, _message(1, name.encode()) + _message(2, data)) for name, (data, _) in features.items()]
        records += framed(_message(1, b"".join(random.permutation(np.array(entries, object)).tolist())))
        wanted.append({name: value for name, (_, value) in features.items()})
    pack = chosen(random, (bytes, bytes, gzip.compress, zlib.compress))
    name, kind = chosen(random, (("a.tfrecord", None), ("train-00000-of-00001", "tfrecord"), ("x.tfrec", None)))
    (folder / name).write_bytes(pack(records))
    data = Dataset(folder, format=kind, shuffle="none")
    for number, value in enumerate(wanted):
        if not same(data[number], value):
            yield Fault("tfrecord: an example has other values", f"{data[number]}, want {value}")


# ---- images ----


def png_of(array: Any) -> bytes:
    """Return a PNG with 16 bits per channel, which Pillow cannot write in colour."""
    height, width, channels = array.shape
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in array)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 16, {1: 0, 2: 4, 3: 2, 4: 6}[channels], 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def tiff_of(array: Any) -> bytes:
    """Return an uncompressed grey TIFF. Pillow can write only few element types."""
    height, width = array.shape
    data: bytes = array.tobytes() + b"\0" * (array.nbytes % 2)
    bits, kind = 8 * array.itemsize, {"u": 1, "i": 2, "f": 3}[array.dtype.kind]
    long, short = 4, 3
    entries = [(256, long, width), (257, long, height), (258, short, bits), (259, short, 1), (262, short, 1)]
    entries += [(273, long, 8), (277, short, 1), (278, long, height), (279, long, array.nbytes), (339, short, kind)]
    told_ = b"".join(struct.pack("<HHII", tag, form, 1, value) for tag, form, value in entries)
    return struct.pack("<2sHI", b"II", 42, 8 + len(data)) + data + struct.pack("<H", len(entries)) + told_ + bytes(4)


def plain_image_of(random: Random, height: int, width: int) -> tuple[str, bytes, Any]:
    """Return a random grey image: its format, its bytes and its exact pixels.

    The element type may be one that the library refuses.
    """
    if random.random() < 0.6:
        kind = chosen(random, ("u1", "i1", "u2", "i2", "u4", "i4", "f4", "f8"))
        array = array_of(random, f"<{kind}", (height, width))
        return "tiff", tiff_of(array), np.repeat(array[:, :, None], 3, axis=2)
    most = int(chosen(random, (255, 256, 1000, 4095, 65535)))
    array = random.integers(0, most + 1, size=(height, width))
    data = array.astype(">u2" if most > 255 else "u1").tobytes()
    return "pgm", f"P5\n{width} {height}\n{most}\n".encode() + data, np.repeat(array[:, :, None], 3, axis=2)


def image_of(random: Random) -> tuple[str, bytes, Any]:
    """Return a random image: its ending, its bytes and its exact pixels.

    The pixels have the shape (height, width, 3).
    """
    height, width = random.integers(1, 9, size=2).tolist()
    if random.random() < 0.3:
        return plain_image_of(random, height, width)
    if random.random() < 0.4:
        deep = array_of(random, "u2", (height, width, int(random.integers(1, 5))))
        colour = deep[:, :, :1] if deep.shape[2] < 3 else deep[:, :, :3]
        return "png", png_of(deep), np.broadcast_to(colour, (height, width, 3))
    mode = chosen(random, ("L", "RGB", "1", "P", "I;16", "F"))
    kind = "tiff" if mode == "F" else chosen(random, ("png", "tiff"))
    if mode in {"I;16", "F"}:
        deep = array_of(random, "u2" if mode == "I;16" else "f4", (height, width))
        made = Pillow.fromarray(deep)
        pixels = np.repeat(deep[:, :, None], 3, axis=2)
    else:
        whole = random.integers(256, size=(height, width, 3), dtype=np.uint8)
        made = Pillow.fromarray(whole).convert(mode)
        pixels = np.asarray(made.convert("RGB"))
    file = io.BytesIO()
    made.save(file, format=kind)
    return kind, file.getvalue(), pixels


def images(random: Random, folder: Path) -> Iterator[Fault]:
    """Decode images that Pillow wrote, and colour images of 16 bits."""
    (folder / "class").mkdir()
    wanted = []
    for number in range(3):
        ending, data, pixels = image_of(random)
        (folder / "class" / f"{number}.{ending}").write_bytes(data)
        wanted.append(pixels)
    data_set = Dataset(folder, format="imagefolder", shuffle="none")
    for number, pixels in enumerate(wanted):
        try:
            found = data_set[number]["image"]
        except DataError as error:
            if pixels.dtype == np.uint8 or not re.search("decode=False|cannot be decoded", str(error)):
                yield Fault("image: one that can be read was refused", str(error))
            continue
        if not same(found, pixels, types=False):
            yield Fault("image: its values were changed", f"{told(found)}, want {told(pixels)}")


FORMATS = (
    Family(name="parquet", run=parquet),
    Family(name="hdf5", run=hdf5),
    Family(name="tar", run=tars),
    Family(name="tfrecord", run=tfrecords),
    Family(name="image", run=images),
)
SHOWS_FORMATS = {
    "data_08_hdf5_segfault_at_exit.py": ["hdf5: a program that fed it did not end well"],
    "data_09_parquet_lists.py": ["parquet: a list has other values", "parquet: a map has other values"],
    "data_10_hdf5_text_error.py": ["hdf5: a text raised what is no DataError"],
}
