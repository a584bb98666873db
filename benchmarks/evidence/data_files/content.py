"""Run random cases on the data from batches, caches, orders, packs and sources."""

import contextlib
import io
import os
import tarfile
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from benchmarks.evidence.data_files.server import serving
from benchmarks.evidence.data_files.values import (
    NUMBERS,
    add_file,
    array_of,
    bytes_of,
    chosen,
    npy_of,
    same,
    shape_of,
    text_of,
    told,
)
from benchmarks.evidence.support.cases import Family, Fault, Random
from benchmarks.evidence.support.former import open_storage
from PIL import Image as Pillow

from multiring._cli import main as command
from multiring.data import Dataset, Loader, Mixture, Shuffle, cached
from multiring.data.packing.writing import PackOptions, pack
from multiring.errors import ArgumentError, DataError

# ---- batches ----


def _files_of(random: Random, folder: Path, kind: str) -> tuple[list[str], list[Any]]:
    """Write samples of several types; return the types and the samples."""
    count, shape = int(random.integers(2, 12)), shape_of(random, 2)
    types = [chosen(random, NUMBERS) for _ in range(int(random.integers(1, 4)))]
    parts = [number * len(types) // count for number in range(count)]
    if kind == "npy-files":
        parts = random.integers(len(types), size=count).tolist()
    orders = [chosen(random, "<>") for _ in range(count)]
    values = [
        array_of(random, np.dtype(types[part]).newbyteorder(order), shape)
        for part, order in zip(parts, orders, strict=True)
    ]
    if kind == "npy-files":
        for number, value in enumerate(values):
            np.save(folder / f"{number:03}.npy", value)
        return types, values
    for part, dtype in enumerate(types):
        own = [value for value, each in zip(values, parts, strict=True) if each == part]
        if own:
            with h5py.File(folder / f"{part}.h5", "w") as file:
                file["array"] = np.stack(own).astype(dtype)
    return types, values


def batches(random: Random, folder: Path) -> Iterator[Fault]:
    """Read batches of samples of several types.

    The values must be equal to the stored values. If no type can hold all values, the loader must raise an error.
    """
    kind = chosen(random, ("npy-files", "hdf5"))
    types, values = _files_of(random, folder, kind)
    size, workers = int(random.integers(1, len(values) + 1)), int(random.integers(1, 3))
    loader = Loader(Dataset(folder, format=kind, shuffle="none"), size, workers=workers)
    found: list[Any] = []
    try:
        for batch in loader:
            found += list(batch["array"])
            wrong = [row for row in range(len(found)) if not same(found[row], values[row], types=False)]
            if wrong:
                text = f"{told(found[wrong[0]])}, want {told(values[wrong[0]])}; types {types}"
                yield Fault("batch: a value was changed", text)
                return
    except DataError as error:
        # NumPy widens these types to float64, which cannot hold some 64-bit integers.
        if np.result_type(*types) != "f8" or not {"i8", "u8"} & set(types):
            yield Fault("batch: values that one type holds were refused", f"{types}: {error}")
        return
    finally:
        loader.close()
    if len(found) != len(values):
        yield Fault("batch: samples are missing", f"{len(found)} of {len(values)}")


# ---- cached ----


class Listed:
    """A map-style data set over a list of values."""

    def __init__(self, values: list[Any]) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, number: int) -> Any:
        return self.values[number]


def tensor_of(random: Random) -> Any:
    """Return a tensor of a random type, shape and content."""
    import torch  # noqa: PLC0415 -- few families need it

    names = (
        "int8 int16 int32 int64 uint8 float16 bfloat16 float32 float64 bool complex64 complex128 float8_e4m3fn uint16"
    )
    dtype = getattr(torch, chosen(random, names.split()))
    shape = shape_of(random)
    size = int(np.prod(shape)) * dtype.itemsize
    data = random.integers(2 if dtype == torch.bool else 256, size=max(size, 1), dtype=np.uint8)
    return torch.from_numpy(data[:size]).view(dtype).reshape(shape)


def leaf_of(random: Random) -> Any:
    """Return a random value of a kind that a sample can hold."""
    draws: tuple[Callable[[], Any], ...] = (
        lambda: tensor_of(random),
        lambda: tensor_of(random),
        lambda: array_of(random, np.dtype(chosen(random, ("c8", *NUMBERS))).newbyteorder("<"), shape_of(random)),
        lambda: array_of(random, np.dtype(chosen(random, NUMBERS)).newbyteorder(">"), (2,)),
        lambda: array_of(random, chosen(random, NUMBERS), (1,))[0],
        lambda: array_of(random, [("a", ">i2"), ("b", "f4")], (2,)),
        lambda: int(random.integers(-(1 << 40), 1 << 40)),
        lambda: float(random.standard_normal()),
        lambda: bool(random.integers(2)),
        lambda: text_of(random),
        lambda: bytes_of(random),
        lambda: np.bytes_(bytes_of(random)),
        lambda: np.str_(text_of(random)),
        lambda: None,
    )
    return chosen(random, draws)()


def sample_of(random: Random) -> Any:
    """Return a random sample: a tuple, a dict or a nested list."""
    parts = [leaf_of(random) for _ in range(int(random.integers(1, 4)))]
    sort = int(random.integers(4))
    if sort == 0:
        return tuple(parts)
    if sort == 1:
        return {f"k{number}": each for number, each in enumerate(parts)}
    return [parts[0], {"in": tuple(parts)}] if sort == 2 else tuple(parts)


def kept(random: Random, folder: Path) -> Iterator[Fault]:
    """Read samples through `cached`, change some of them, and read them again."""
    values = [sample_of(random) for _ in range(int(random.integers(1, 12)))]
    for turn in range(int(random.integers(2, 4))):
        try:
            data = cached(Listed(values), folder / "cache")
            found = [[data[number] for number in range(len(values))] for _ in range(2)]
        except DataError:
            return  # `cached` refused the sample by name
        for number, value in enumerate(values):
            for each in (found[0][number], found[1][number]):
                if not same(each, value):
                    sort = "a changed sample came back as it was" if turn else "a value came back as another"
                    has_tensor = "tensor" in repr(value) and not turn
                    sign = "a sample with tensors came back as another" if has_tensor else sort
                    yield Fault(f"cached: {sign}", f"{told(each)}, want {told(value)}")
                    return
        for number in random.integers(len(values), size=int(random.integers(1, 3))).tolist():
            values[number] = sample_of(random)


# ---- orders ----


def _arrays(random: Random, folder: Path, count: int, shards: int, first: int = 0) -> Path:
    folder.mkdir()
    edges = [0, *sorted(random.integers(0, count + 1, size=shards - 1).tolist()), count]
    for number, (begin, end) in enumerate(pairwise(edges)):
        np.save(folder / f"{number}.npy", np.arange(first + begin, first + end))
    return folder


def shuffle_of(random: Random) -> Shuffle:
    """Return a random shuffle setting."""
    kind = chosen(random, ("exact", "windowed", "none"))
    return Shuffle(kind, window=int(random.integers(1, 5))) if kind == "windowed" else Shuffle(kind)


def mixture(random: Random, folder: Path) -> Iterator[Fault]:
    """Read a mixture: each of its data sets must come in its own order."""
    sizes = random.integers(20, 1500, size=int(random.integers(1, 4))).tolist()
    weights = sizes if random.random() < 0.5 else random.integers(1, 9, size=len(sizes)).tolist()
    parts, firsts = [], np.cumsum([0, *sizes])
    for number, size in enumerate(sizes):
        where = _arrays(random, folder / str(number), size, int(random.integers(1, 5)), int(firsts[number]))
        parts.append(Dataset(where, seed=int(random.integers(99)), shuffle=shuffle_of(random)))
    mixed = Mixture(parts, weights, seed=int(random.integers(99)))
    seen: list[int] = []
    for _ in range(2):
        loader = Loader(mixed, int(random.integers(50, 400)))
        loader.load_state_dict(loader.state_dict() | {"epoch": len(seen) // sum(sizes)})
        for batch in loader:
            seen += np.asarray(batch["array"]).tolist()
    for number, part in enumerate(parts):
        own = [each - int(firsts[number]) for each in seen if firsts[number] <= each < firsts[number + 1]]
        passes = range(-(-len(own) // sizes[number]))
        places = np.arange(sizes[number])
        wanted = [int(part[int(each)]["array"]) for one in passes for each in part.order.samples(one, places)]
        wanted = [each - int(firsts[number]) for each in wanted]
        if own != wanted[: len(own)]:
            yield Fault("mixture: a data set does not come in its own order", f"{sizes} by {weights}: {own[:9]} ...")
            return
    if weights == sizes and sorted(seen[: sum(sizes)]) != list(range(sum(sizes))):
        yield Fault("mixture: an epoch has not each sample once", f"{sizes}")


def states(random: Random, folder: Path) -> Iterator[Fault]:
    """Load the state of one order into a loader with another order.

    The loader must refuse the state if and only if the orders differ.
    """
    count = int(random.integers(8, 60))
    where = _arrays(random, folder / "d", count, int(random.integers(1, 9)))
    seed = int(random.integers(9))

    def drawn() -> Dataset:
        data = Dataset(where, seed=seed, shuffle=shuffle_of(random))
        if random.random() < 0.3:
            return data.weighted(random.integers(1, 4, size=count).tolist(), count)
        return data

    before, after = drawn(), drawn()
    loader = Loader(before, int(random.integers(1, count + 1)))
    next(iter(loader))
    state = loader.state_dict()
    later = Loader(after, 4)
    orders = [[each.order.samples(epoch, np.arange(count)).tolist() for epoch in range(3)] for each in (before, after)]
    try:
        later.load_state_dict(state)
    except ArgumentError as error:
        if orders[0] == orders[1] and count > 12 and type(before.order) is type(after.order):
            told_ = [getattr(each.order, "window", None) for each in (before, after)]
            if told_[0] == told_[1]:
                yield Fault("state: that of the same order was refused", str(error))
        return
    if orders[0] != orders[1]:
        yield Fault("state: that of another order was taken", f"{before.order!r} {after.order!r} of {count}")


# ---- sources ----


def urls(random: Random, folder: Path) -> Iterator[Fault]:
    """Read files by `multiring::` URLs while the files change."""
    import fsspec  # noqa: PLC0415 -- few families need it

    root = folder / "served"
    root.mkdir()
    with serving(root) as server:
        server.validators = chosen(random, ("etag", "time", "both", "none"))
        size = int(chosen(random, (10, 3000, (1 << 20) + 5, (2 << 20) + 77)))
        url, old = f"multiring::{server.url}/f", b""
        for version in range(int(random.integers(2, 4))):
            content = bytes([65 + version]) * (size + int(random.integers(2)) * int(random.integers(1, 99)))
            (root / "f").write_bytes(content)
            stamp = 1.6e9 + 1000 * version
            os.utime(root / "f", (stamp, stamp))
            ends = sorted(random.integers(0, len(content) + 1, size=2).tolist())
            wanted = content
            with fsspec.open(url, "rb", multiring={"cache": str(folder / "cache")}, skip_instance_cache=True) as file:
                if random.random() < 0.5:
                    file.seek(ends[0])
                    wanted = content[ends[0] : ends[1]]
                    found = file.read(ends[1] - ends[0])
                else:
                    found = file.read()
            if found != wanted:
                sign = "half old and half new" if set(found) - set(old) else "the old bytes"
                text = f"{len(found)} bytes of {sorted(set(found))}, want {len(wanted)} of {sorted(set(wanted))}"
                yield Fault(f"url: a file that was changed came as {sign}", f"{text}; {server.validators}")
                return
            old = content


def sources(random: Random, folder: Path) -> Iterator[Fault]:
    """Read from a source that fails once or permanently; its URL contains a secret.

    No error may contain the secret.
    """
    root = folder / "served"
    root.mkdir()
    content = random.integers(256, size=int(random.integers(1, 5000)), dtype=np.uint8).tobytes()
    (root / "f.bin").write_bytes(content)
    secret = "S3cr" + "".join(chosen(random, "abcdefgh0123456789") for _ in range(9))
    with serving(root) as server:
        place = server.url.partition("//")[2]
        forms = (
            f"http://user:{secret}@{place}/f.bin",
            f"http://{secret}@{place}/f.bin",
            f"http://{place}/f.bin?X-Amz-Signature={secret}&x=1",
            f"http://u:{secret}@{place}/f.bin?token={secret}",
        )
        storage = open_storage(chosen(random, forms), timeout_s=20)
        passing = random.random() < 0.5
        server.fails = int(random.integers(1, 4)) if passing else 1 << 30
        # A storage retries server errors for a long time, so permanent failures use client error codes.
        server.status = int(chosen(random, (500, 502, 503, 429) if passing else (403, 404, 410, 401)))
        out = bytearray(len(content))
        try:
            storage.read_into("", 0, memoryview(out))
            if bytes(out) != content:
                yield Fault("source: other bytes", f"status {server.status}")
        except Exception as error:  # noqa: BLE001 -- every error is checked
            if secret in str(error) or secret in repr(error.__cause__) or secret in repr(error.__context__):
                yield Fault("source: a secret stands in an error", str(error))
            if passing:
                yield Fault("source: one that failed for a moment ended a reading", f"{server.status}: {error}")
            elif not isinstance(error, DataError):
                yield Fault("source: an error that is no DataError", repr(error))


# ---- packs ----


def _tar(random: Random, path: Path, count: int) -> None:
    fields: list[tuple[str, Callable[[], bytes]]] = []

    def array() -> bytes:
        dtype: Any = chosen(random, (np.dtype(chosen(random, ("c16", *NUMBERS))).newbyteorder(">"), "i8", "f4"))
        dtype = [("a", "<i4"), ("b", ">f8")] if random.random() < 0.2 else dtype
        return npy_of(array_of(random, dtype, (2, 3) if random.random() < 0.8 else (4,)))

    fields += [("npy", array), ("cls", lambda: str(int(random.integers(-(1 << 63), (1 << 63) - 1))).encode())]
    fields += [("txt", lambda: text_of(random).encode()), ("bin", lambda: bytes_of(random, 3000))]
    used = [fields[each] for each in random.permutation(len(fields))[: int(random.integers(2, 5))]]
    with tarfile.open(path, "w") as tar:
        for number in range(count):
            for each in random.permutation(len(used)):
                name, draw = used[each]
                add_file(tar, f"{number:04}.{name}", draw())


def packs(random: Random, folder: Path) -> Iterator[Fault]:
    """Pack samples, read them again, and damage the pack."""
    (folder / "d").mkdir()
    count = int(random.integers(1, 12))
    _tar(random, folder / "d" / "a.tar", count)
    data = Dataset(folder / "d", shuffle="none", decode=False)
    size = int(chosen(random, (2000, 1 << 20)))
    try:
        made = pack(data.source, count, folder / "p", PackOptions(shard_bytes=size), lambda *_: None)
    except DataError as error:
        yield Fault("pack: a sample was refused", str(error))
        return
    again = Dataset(folder / "p", shuffle="none")
    for number in range(count):
        if not same(again[number], data[number]):
            yield Fault("pack: a sample came back as another", f"{again[number]}, want {data[number]}")
            return
    loader = Loader(Dataset(folder / "p", shuffle="none"), count)
    with contextlib.suppress(DataError):  # the samples may have different shapes
        for name, rows in next(iter(loader)).items():
            for number in range(count):
                if not same(rows[number], data[number][name], types=False):
                    yield Fault("pack: a batch has other values", f"{name}: {told(rows[number])}")
    loader.close()
    shard = folder / "p" / made.shards[int(random.integers(len(made.shards)))].name
    content = bytearray(shard.read_bytes())
    content[int(random.integers(len(content)))] ^= 1 << int(random.integers(8))
    shard.write_bytes(content)
    damaged = Dataset(folder / "p", shuffle="none")
    for number in range(count):
        with contextlib.suppress(DataError):
            if not same(damaged[number], data[number]):
                yield Fault("pack: damaged bytes were given", f"{damaged[number]}, want {data[number]}")
                return


def broken_images(random: Random, folder: Path) -> Iterator[Fault]:
    """Run `multiring data pack --skip-bad` on images of which some are broken."""
    count = int(random.integers(2, 7))
    broken = set(random.integers(count, size=int(random.integers(1, 3))).tolist())
    (folder / "d" / "class").mkdir(parents=True)
    for number in range(count):
        file = io.BytesIO()
        pixels = random.integers(256, size=(16, 16, 3), dtype=np.uint8)
        Pillow.fromarray(pixels).save(file, format=(kind := chosen(random, ("png", "jpeg"))))
        data = file.getvalue()
        if number in broken:
            data = chosen(random, (b"nothing", data[: len(data) // 3], data[:40]))
        (folder / "d" / "class" / f"{number}.{kind}").write_bytes(data)
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        code = command(["data", "pack", str(folder / "d"), str(folder / "p"), "--skip-bad"])
        verified = command(["data", "verify", str(folder / "p")]) if code == 0 else 0
    said = out.getvalue()
    if code == 0 and len(Dataset(folder / "p", decode=False)) != count - len(broken):
        yield Fault("pack: a broken image was packed", said)
    elif code == 0 and (verified or str(len(broken)) not in said):
        yield Fault("pack: what was left out is not said", said)
    elif code and len(broken) < count:
        yield Fault("pack: broken images ended it", said)


CONTENT = (
    Family(name="batch", run=batches),
    Family(name="cached", run=kept),
    Family(name="mixture", run=mixture),
    Family(name="state", run=states),
    Family(name="url", run=urls),
    Family(name="source", run=sources),
    Family(name="pack", run=packs),
    Family(name="broken", run=broken_images),
)
SHOWS_CONTENT = {
    "data_05_cached_tensor_types.py": ["cached: a sample with tensors came back as another"],
    "data_06_cached_stale.py": ["cached: a changed sample came back as it was"],
    "data_07_batch_wraps_integers.py": ["batch: a value was changed"],
    "data_12_mixture_order.py": ["mixture: a data set does not come in its own order"],
    "data_16_cache_url_stale.py": ["url: a file that was changed came as half old and half new"],
    "data_18_state_of_another_order.py": ["state: that of another order was taken"],
    "reader_08.py": ["url: a file that was changed came as the old bytes"],
    "reader_14.py": ["cached: a changed sample came back as it was"],
    "reader_19.py": ["source: a secret stands in an error"],
}
