"""Read random shards in MosaicML Streaming's format, and random .npy files."""

import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import zstandard
from benchmarks.evidence.data_files.values import NUMBERS, array_of, bytes_of, chosen, same, shape_of, text_of, told
from benchmarks.evidence.support.cases import Family, Fault, Random

from multiring.data import Dataset, Loader, Shuffle
from multiring.errors import ArgumentError, DataError

Column = tuple[str, int | None, Callable[[], tuple[bytes, Any]]]


def column_of(random: Random) -> Column:
    """Return a random column.

    A column has an encoding, a size (None if the size varies), and a function that draws a value and its bytes.
    """
    sort = chosen(random, ("number", "number", "int", "str", "bytes", "json", "array", "str_int", "str_float"))
    if sort == "number":
        kind = np.dtype(chosen(random, [each for each in NUMBERS if each != "?"]))

        def number() -> tuple[bytes, Any]:
            value = array_of(random, kind, (1,))[0]
            return value.tobytes(), value

        return kind.name, kind.itemsize, number
    if sort == "array":
        kind, shape = np.dtype(chosen(random, [each for each in NUMBERS if each != "?"])), (*shape_of(random), 2)

        def array() -> tuple[bytes, Any]:
            value = array_of(random, kind, shape)
            return value.tobytes(), value

        return f"ndarray:{kind.name}:{','.join(map(str, shape))}", int(np.prod(shape)) * kind.itemsize, array
    drawn: dict[str, Callable[[], tuple[bytes, Any]]] = {
        "int": lambda: ((value := array_of(random, "i8", (1,))[0]).tobytes(), value),
        "str": lambda: ((text := text_of(random)).encode(), text),
        "bytes": lambda: ((data := bytes_of(random)), data),
        "json": lambda: (json.dumps(value := [text_of(random), None, 1.5]).encode(), value),
        "str_int": lambda: (str(value := int(random.integers(1 << 60)) * 10**9).encode(), value),
        "str_float": lambda: (repr(value := float(random.standard_normal())).encode(), value),
    }
    return sort, 8 if sort == "int" else None, drawn[sort]


def mds(random: Random, folder: Path) -> Iterator[Fault]:
    """Read random shards in MosaicML Streaming's MDS format."""
    columns = [column_of(random) for _ in range(int(random.integers(1, 4)))]
    names = [f"c{number}" for number in range(len(columns))]
    is_packed = random.random() < 0.4
    wanted, shards = [], []
    for shard in range(int(random.integers(1, 3))):
        samples = []
        for _ in range(int(random.integers(1, 6))):
            drawn = [draw() for _, _, draw in columns]
            varying = [len(data) for (data, _), (_, size, _) in zip(drawn, columns, strict=True) if size is None]
            samples.append(struct.pack(f"<{len(varying)}I", *varying) + b"".join(data for data, _ in drawn))
            wanted.append({name: value for name, (_, value) in zip(names, drawn, strict=True)})
        text = b'{"description": 1}'
        begins = np.cumsum([4 * (len(samples) + 2) + len(text), *map(len, samples)]).astype("<u4")
        whole = struct.pack("<I", len(samples)) + begins.tobytes() + text + b"".join(samples)
        raw = {"basename": f"shard.{shard:05}.mds", "bytes": len(whole), "hashes": {}}
        packed = zstandard.compress(whole)
        entry = {
            "format": "mds",
            "version": 2,
            "samples": len(samples),
            "raw_data": raw,
            "zip_data": None,
            "compression": None,
            "column_names": names,
            "column_encodings": [each[0] for each in columns],
            "column_sizes": [each[1] for each in columns],
        }
        if is_packed:
            name = f"shard.{shard:05}.mds.zstd"
            entry |= {"compression": "zstd:3", "zip_data": {"basename": name, "bytes": len(packed), "hashes": {}}}
            (folder / name).write_bytes(packed)
        else:
            (folder / str(raw["basename"])).write_bytes(whole)
        shards.append(entry)
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": shards}))
    data = Dataset(folder, shuffle="none")
    for number, value in enumerate(wanted):
        if not same(data[number], value):
            yield Fault("mds: a sample has other values", f"{data[number]}, want {value}")


def npy(random: Random, folder: Path) -> Iterator[Fault]:
    """Read arrays of any type that NumPy wrote, in a random order, on several ranks."""
    dtype: Any = chosen(random, ("c8", "c16", "M8[s]", "m8[ns]", "S5", "U3", *NUMBERS))
    if random.random() < 0.1:
        dtype = [("a", "<i2"), ("b", ">f8")]
    kind = np.dtype(dtype)
    shape, arrays = shape_of(random), []
    for shard in range(int(random.integers(1, 4))):
        size = (int(random.integers(1, 9)), *shape)
        if kind.kind in "SU":
            texts = np.array([text_of(random)[:3] for _ in range(int(np.prod(size)))]).reshape(size)
            values = np.char.encode(texts, "utf-8").astype(kind) if kind.kind == "S" else texts.astype(kind)
        elif kind.kind in "Mm":
            values = array_of(random, "i4", size).astype("i8").view(kind)
        else:
            order = "<" if shard == 0 or kind.names else kind.byteorder
            values = array_of(random, kind.newbyteorder(order), size)
        arrays.append(values)
        np.save(folder / f"{shard}.npy", values)
    flat = [row for each in arrays for row in each]
    try:
        data = Dataset(folder, format="npy", seed=2, shuffle=chosen(random, ("exact", Shuffle("windowed", window=2))))
    except (ArgumentError, DataError) as error:
        yield Fault("npy: arrays were refused", f"{kind}: {error}")
        return
    ranks, batch = int(random.integers(1, 4)), int(random.integers(1, len(flat) + 1))
    order_ = data.order.samples(0, np.arange(len(flat))).tolist()
    if sorted(order_) != list(range(len(flat))):
        yield Fault("npy: the order has not each sample once", f"{order_}")
    for rank in range(ranks):
        loader = Loader(data, batch, rank=rank, ranks=ranks, workers=1)
        found = [row for each in loader for row in each["array"][: loader.share.samples]]
        wanted = [
            flat[each] for begin in range(0, len(flat), batch) for each in order_[begin : begin + batch][rank::ranks]
        ]
        if len(found) != len(wanted) or not all(same(*each, types=False) for each in zip(found, wanted, strict=True)):
            yield Fault("npy: a batch has other values", f"{kind}: {told(found)}, want {told(wanted)}")
        loader.close()


SHARDS = (Family(name="mds", run=mds), Family(name="npy", run=npy))
