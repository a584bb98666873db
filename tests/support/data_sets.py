"""Small data sets with the same samples in every format."""

import io
import json
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard
from PIL import Image

from multiring.data import Dataset
from multiring.data.packing.writing import PackOptions, pack
from multiring.data.readers.tfrecord import masked_crc

COUNT = 12


def array(number: int) -> Any:
    return np.random.default_rng(number).normal(size=(3, 4)).astype(np.float32)


def picture(number: int, ending: str = "png") -> bytes:
    pixels = np.random.default_rng(number).integers(0, 255, (9, 7, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, {"jpg": "JPEG"}.get(ending, ending.upper()), quality=95)
    return file.getvalue()


def folder(place: Path) -> str:
    for number in range(COUNT):
        home = place / ("cat", "dog")[number % 2]
        home.mkdir(parents=True, exist_ok=True)
        ending = ("png", "jpg")[number % 3 == 0]
        (home / f"{number:02}.{ending}").write_bytes(picture(number, ending))
    return str(place)


def tar(place: Path) -> str:
    place.mkdir()
    for shard in range(3):
        with tarfile.open(place / f"{shard}.tar", "w") as file:
            for number in range(shard * 4, shard * 4 + 4):
                data = io.BytesIO()
                np.save(data, array(number))
                for name, content in (("npy", data.getvalue()), ("cls", b"%d" % number), ("json", b'{"a": [1]}')):
                    head = tarfile.TarInfo(f"{number:04}.{name}")
                    head.size = len(content)
                    file.addfile(head, io.BytesIO(content))
    return str(place)


def npy(place: Path) -> str:
    place.mkdir()
    for shard in range(3):
        np.save(place / f"{shard}.npy", np.stack([array(n) for n in range(shard * 4, shard * 4 + 4)]))
    return str(place)


def npy_files(place: Path) -> str:
    place.mkdir()
    for number in range(COUNT):
        np.save(place / f"{number:03}.npy", array(number))
    return str(place)


def hdf5(place: Path) -> str:
    place.mkdir()
    for shard in range(2):
        with h5py.File(place / f"{shard}.h5", "w") as file:
            numbers = range(shard * 6, shard * 6 + 6)
            file.create_dataset(
                "array", data=np.stack([array(n) for n in numbers]), chunks=(2, 3, 4), compression="gzip"
            )
            file["label"] = np.array(numbers)
    return str(place)


def parquet(place: Path) -> str:
    place.mkdir()
    table = pa.table(
        {
            "array": [array(n).ravel().tolist() for n in range(COUNT)],
            "label": list(range(COUNT)),
            "image": [{"bytes": picture(n), "path": f"{n}.png"} for n in range(COUNT)],
        }
    )
    pq.write_table(table, place / "a.parquet", row_group_size=5)
    return str(place)


def mds(place: Path, compression: str | None = None) -> str:
    place.mkdir()
    shards = []
    for shard in range(2):
        samples = []
        for number in range(shard * 6, shard * 6 + 6):
            image = picture(number)
            samples.append(struct.pack("<I", len(image)) + array(number).tobytes() + image + struct.pack("<q", number))
        begins = np.cumsum([4 + 4 * 7 + 20, *(len(each) for each in samples)]).astype("<u4")
        raw = struct.pack("<I", 6) + begins.tobytes() + b"{}" + bytes(18) + b"".join(samples)
        name = f"shard.{shard:05}.mds"
        told: dict[str, Any] = {
            "format": "mds",
            "samples": 6,
            "compression": compression,
            "column_names": ["array", "image", "label"],
            "column_encodings": ["ndarray:float32:3,4", "png", "int"],
            "column_sizes": [48, None, 8],
            "raw_data": {"basename": name, "bytes": len(raw), "hashes": {}},
            "zip_data": None,
        }
        if compression:
            packed = zstandard.compress(raw)
            told["zip_data"] = {"basename": f"{name}.zstd", "bytes": len(packed), "hashes": {}}
        (place / (f"{name}.zstd" if compression else name)).write_bytes(packed if compression else raw)
        shards.append(told)
    (place / "index.json").write_text(json.dumps({"version": 2, "shards": shards}))
    return str(place)


def mds_zstd(place: Path) -> str:
    return mds(place, "zstd")


def _message(number: int, content: bytes) -> bytes:
    size = bytearray()
    count = len(content)
    while count >= 128:
        size.append(count & 127 | 128)
        count >>= 7
    return bytes([number << 3 | 2]) + bytes([*size, count]) + content


def tfrecord(place: Path) -> str:
    place.mkdir()
    for shard in range(2):
        out = b""
        for number in range(shard * 6, shard * 6 + 6):
            features = {
                b"array": _message(2, _message(1, array(number).tobytes())),
                b"image": _message(1, _message(1, picture(number))),
                b"label": _message(3, _message(1, bytes([number]))),
            }
            entries = (_message(1, _message(1, name) + _message(2, each)) for name, each in features.items())
            data = _message(1, b"".join(entries))
            length = struct.pack("<Q", len(data))
            out += length + struct.pack("<I", masked_crc(length)) + data + struct.pack("<I", masked_crc(data))
        (place / f"a-{shard}.tfrecord").write_bytes(out)
    return str(place)


def packed(place: Path) -> str:
    source = Dataset(mds(place.with_name(f"{place.name}-of")), shuffle="none").source
    pack(source, COUNT, place, PackOptions(shard_bytes=3000), lambda *_: None)
    return str(place)


MAKERS: dict[str, Callable[[Path], str]] = {
    "hdf5": hdf5,
    "imagefolder": folder,
    "mds": mds,
    "mds-zstd": mds_zstd,
    "npy": npy,
    "npy-files": npy_files,
    "pack": packed,
    "parquet": parquet,
    "tar": tar,
    "tfrecord": tfrecord,
}


def opened(kind: str, url: str, **options: Any) -> Dataset:
    """Open one of the small data sets. Formats without random access are read in the order of their shards."""
    shuffle = "windowed" if kind in {"parquet", "mds-zstd"} else "exact"
    wanted = "npy-files" if kind == "npy-files" else None
    return Dataset(url, **{"format": wanted, "shuffle": shuffle, **options})
