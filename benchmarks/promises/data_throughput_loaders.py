"""Run one library on a case of data_throughput.py, in the library's environment.

The arguments are NAME CASE FOLDER WORKERS SECONDS.
"""

import io
import itertools
import json
import multiprocessing
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

BATCH, CROP, GROUP = 64, 224, 32


def crop_of(image: Any, number: int) -> Any:
    """Return a square of an image's pixels; its position depends on `number`."""
    top, left = number * 7 % (image.shape[0] - CROP), number * 13 % (image.shape[1] - CROP)
    return image[top : top + CROP, left : left + CROP]


def decoded(data: bytes) -> Any:
    """Decode a JPEG with the decoder that all libraries use; return its pixels."""
    import simplejpeg  # noqa: PLC0415 -- not in every environment that runs this file

    return simplejpeg.decode_jpeg(data)


def array_in(data: bytes) -> Any:
    """Return the array in the bytes of a .npy file."""
    return np.load(io.BytesIO(data), allow_pickle=False)


def files(place: Path) -> list[Path]:
    """Return the paths of the data set's files."""
    return sorted((place / "files" / "a").iterdir())


def sample_of(data: bytes, case: str, number: int) -> Any:
    """Return the training sample in a file's bytes."""
    return crop_of(decoded(data), number) if case == "jpeg" else array_in(data)


def multiring(case: str, place: Path, workers: int) -> Iterator[int]:
    """Yield the sizes of multiring's batches."""
    from multiring.data import Dataset, Loader  # noqa: PLC0415 -- as above
    from multiring.data.augment import RandomCrop  # noqa: PLC0415 -- as above

    data = Dataset(str(place / "pack"), transform=RandomCrop(CROP) if case == "jpeg" else None)
    loader = Loader(data, BATCH, workers=workers)
    while True:
        for batch in loader:
            yield len(batch["image" if case == "jpeg" else "array"])


class Files:
    """A map-style data set of files for torch."""

    def __init__(self, place: Path, case: str) -> None:
        self._files, self._case = files(place), case

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, number: int) -> Any:
        return np.ascontiguousarray(sample_of(self._files[number].read_bytes(), self._case, number))


def batches_of(dataset: Any, workers: int, **options: Any) -> Iterator[int]:
    """Yield the sizes of the batches of torch's DataLoader."""
    from torch.utils.data import DataLoader  # noqa: PLC0415 -- as above

    loader: Iterable[Any] = DataLoader(
        dataset, **{"batch_size": BATCH, "num_workers": workers, "persistent_workers": True, **options}
    )
    while True:
        for batch in loader:
            yield len(batch if not isinstance(batch, dict | list | tuple) else next(iter(_values(batch))))


def _values(batch: Any) -> Any:
    return batch.values() if isinstance(batch, dict) else batch


def torch(case: str, place: Path, workers: int) -> Iterator[int]:
    """Yield the sizes of torch's batches over the files."""
    return batches_of(Files(place, case), workers, shuffle=True)


class Decode:
    """Turns a record of WebDataset into a sample."""

    def __init__(self, case: str) -> None:
        self._case = case

    def __call__(self, record: Any) -> Any:
        """Return the record's sample."""
        field = next(name for name in record if name.endswith(("jpg", "npy")))
        return np.ascontiguousarray(sample_of(record[field], self._case, hash(record["__key__"]) % 1000))


def webdataset(case: str, place: Path, workers: int) -> Iterator[int]:
    """Yield the sizes of WebDataset's batches over the pack's shards."""
    import webdataset as wds  # noqa: PLC0415 -- as above

    shards = sorted(str(each) for each in (place / "pack").glob("*.tar"))
    data = wds.WebDataset(shards * workers, shardshuffle=100, empty_check=False).shuffle(256).map(Decode(case))
    return batches_of(data.batched(BATCH, collation_fn=np.stack), workers, batch_size=None)


def streaming(case: str, place: Path, workers: int) -> Iterator[int]:
    """Yield the sizes of MosaicML Streaming's batches over MDS shards."""
    from streaming import MDSWriter, StreamingDataset  # noqa: PLC0415 -- as above

    folder = place / "mds"
    if not folder.exists():
        with MDSWriter(out=str(folder), columns={"x": "bytes"}, size_limit=64 << 20) as writer:
            for file in files(place):
                writer.write({"x": file.read_bytes()})

    return batches_of(_sampled(StreamingDataset, case)(local=str(folder), shuffle=True, batch_size=BATCH), workers)


def _sampled(base: Any, case: str) -> Any:
    """Return a subclass of a data set whose items are samples."""

    class Sampled(base):  # type: ignore[misc]  # as is told of `base`
        def __getitem__(self, number: Any) -> Any:
            found = super().__getitem__(number)
            data = found["x"] if isinstance(found, dict) else found
            return np.ascontiguousarray(sample_of(data, case, int(getattr(number, "index", number))))

    return Sampled


def litdata(case: str, place: Path, workers: int) -> Iterator[int]:
    """Yield the sizes of litdata's batches over its own chunks."""
    from litdata import StreamingDataLoader, StreamingDataset, optimize  # noqa: PLC0415 -- as above

    folder = place / "litdata"
    if not folder.exists():  # `optimize` changes settings of later processes, so it runs in a separate process
        words = {"inputs": files(place), "output_dir": str(folder), "chunk_bytes": "64MB", "num_workers": 1}
        made = multiprocessing.get_context("fork").Process(target=optimize, args=(Path.read_bytes,), kwargs=words)
        made.start()
        made.join()

    data = _sampled(StreamingDataset, case)(str(folder), shuffle=True)
    loader = StreamingDataLoader(data, batch_size=BATCH, num_workers=workers)
    while True:
        for batch in loader:
            yield len(batch)


def tfdata_accurate(case: str, place: Path, workers: int) -> Iterator[int]:
    """Yield the sizes of tf.data's batches, whose pixels are those of the other libraries."""
    return tfdata(case, place, workers, cosine_transform="INTEGER_ACCURATE")


def tfdata(case: str, place: Path, workers: int, cosine_transform: str = "") -> Iterator[int]:
    """Yield the sizes of tf.data's batches over TFRecords.

    TensorFlow decodes and crops a JPEG in one operation. Its default is a faster discrete cosine transform than that of
    the other libraries, with which two thirds of the pixels differ from theirs.
    """
    import tensorflow as tf  # noqa: PLC0415 -- as above

    file = place / "a.tfrecord"
    if not file.exists():
        with tf.io.TFRecordWriter(str(file)) as writer:
            for each in files(place):
                writer.write(each.read_bytes() if case == "jpeg" else array_in(each.read_bytes()).tobytes())

    def sample(data: Any) -> Any:
        if case == "jpeg":
            top, left = tf.random.uniform((), 0, 375 - CROP, tf.int32), tf.random.uniform((), 0, 500 - CROP, tf.int32)
            return tf.io.decode_and_crop_jpeg(data, [top, left, CROP, CROP], dct_method=cosine_transform)
        return tf.io.decode_raw(data, tf.float32)

    data = tf.data.TFRecordDataset(str(file)).repeat().shuffle(256).map(sample, num_parallel_calls=workers)
    for batch in data.batch(BATCH).prefetch(2):
        yield int(batch.shape[0])


def bound(case: str, place: Path, workers: int) -> Iterator[int]:
    """Yield the numbers of samples that plain threads copy, or whose crops they decode and do nothing else."""
    paths = files(place)
    done = [0] * workers

    def copy(number: int) -> None:
        out = bytearray(paths[0].stat().st_size)
        for turn in itertools.count(number, workers):
            with paths[turn % len(paths)].open("rb", buffering=0) as file:
                file.readinto(out)
            done[number] += 1

    def decode(number: int) -> None:
        groups = crops_of(paths[number::workers])
        for group in itertools.cycle(groups):
            done[number] += sum(decode_regions(group))

    if case == "jpeg":
        from multiring.data.jpeg import decode_regions  # noqa: PLC0415 -- not in every environment that runs this file

    for number in range(workers):
        threading.Thread(target=decode if case == "jpeg" else copy, args=(number,), daemon=True).start()
    last = 0
    while True:
        time.sleep(0.05)
        now = sum(done)
        yield now - last
        last = now


def crops_of(paths: list[Path]) -> list[list[Any]]:
    """Return the crops of files in memory, in groups that are decoded by one call into the same arrays."""
    from multiring.data.jpeg import Region, WantedRegion, size_of  # noqa: PLC0415 -- as above

    outs = np.empty((GROUP, CROP, CROP, 3), np.uint8)
    crops = []
    for number, path in enumerate(paths):
        data = path.read_bytes()
        height, width = size_of(data) or (0, 0)
        region = Region(number * 7 % (height - CROP), number * 13 % (width - CROP), CROP, CROP)
        crops.append(WantedRegion(data, (height, width), region, outs[number % GROUP], is_sound=True))
    return [crops[begin : begin + GROUP] for begin in range(0, len(crops), GROUP)]


def disk(case: str, place: Path, workers: int) -> Iterator[int]:
    """Yield the numbers of files that plain threads read, once and in order."""
    del case
    done = [0] * workers
    paths = files(place)

    def work(number: int) -> None:
        for path in paths[number::workers]:
            path.read_bytes()
            done[number] += 1

    for number in range(workers):
        threading.Thread(target=work, args=(number,), daemon=True).start()
    last = 0
    while last < len(paths):
        time.sleep(0.002)
        now = sum(done)
        yield now - last
        last = now


LIBRARIES = {
    "bound": bound,
    "disk": disk,
    "litdata": litdata,
    "multiring": multiring,
    "streaming": streaming,
    "tfdata": tfdata,
    "tfdata_accurate": tfdata_accurate,
    "torch": torch,
    "webdataset": webdataset,
}


def main(name: str, case: str, place: Path, workers: int, seconds: float) -> float:
    """Return a library's samples per second, without its first two batches.

    With `seconds` of 0, time one whole epoch with its first batches.
    """
    source = LIBRARIES[name](case, place, workers)
    if not seconds:
        total, count, began = len(files(place)), 0, time.monotonic()
        while count < total:
            count += next(source)
        return count / (time.monotonic() - began)
    for _ in range(2):
        next(source)
    count, began = 0, time.monotonic()
    while time.monotonic() - began < seconds:
        count += next(source)
    return count / (time.monotonic() - began)


if __name__ == "__main__":
    print("RATE " + json.dumps(main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5]))))
