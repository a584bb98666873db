"""Make samples of stored records: decode their images, crop, transform."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from multiring.data.augment import CropsFirst, cut, only_crop
from multiring.data.decoding import RegionDecoding, decode_together, decoded
from multiring.data.jpeg import Region, WantedRegion, decode_regions, size_of
from multiring.data.permutation import Numbers, keyed_words
from multiring.data.readers.limits import Limits
from multiring.data.readers.source import Image, Record, Source
from multiring.errors import DataError

Transform = Callable[[Record, np.random.Generator], Record]
Finish = Callable[[], Record]
_MOST_REUSED = 1 << 24  # bytes that each thread keeps for encoded images


def generator_for(seed: int, epoch: int, number: int, draw: int = 0) -> np.random.Generator:
    """Return the random generator for a sample's augmentation.

    Its numbers depend on the arguments alone.

    Args:
        seed: the data set's seed.
        epoch: 0 or more.
        number: the sample's number.
        draw: the sample's position in the epoch if an epoch can contain a sample twice; 0 otherwise.
    """
    return np.random.Generator(np.random.Philox(key=_key_of(seed, epoch, number, draw)))


def _key_of(seed: int, epoch: int, number: int, draw: int) -> NDArray[np.uint64]:
    return keyed_words(2, "augmentation", seed, epoch, number, draw)


class _ReusedMemory:
    """Memory for the encoded images of a group of samples, which the next group reuses.

    New memory costs a page fault for each 4 KiB, which takes three times as long as the copy into it.
    """

    def __init__(self) -> None:
        self._memory = memoryview(bytearray())
        self._end = self._wanted = 0
        self._is_taken = False

    @contextmanager
    def group(self) -> Iterator[Callable[[int], memoryview]]:
        """Yield a function that returns so many bytes with undefined contents, to be used inside the block.

        They are new if too few are left, or inside the block of another group: a transform may read samples, too.
        """
        if self._is_taken:
            yield _new_memory
            return
        self._is_taken, self._end, self._wanted = True, 0, 0
        try:
            yield self._take
        finally:
            self._is_taken = False
            if self._wanted > len(self._memory) and len(self._memory) < _MOST_REUSED:
                self._memory = _new_memory(min(_MOST_REUSED, self._wanted + self._wanted // 4))

    def _take(self, size: int) -> memoryview:
        self._wanted += size
        if size > len(self._memory) - self._end:
            return _new_memory(size)
        begin, self._end = self._end, self._end + size
        return self._memory[begin : self._end]


def _new_memory(size: int) -> memoryview:
    return memoryview(bytearray(size))


class _ReusedGenerator:
    """A generator that begins anew for each sample, as `generator_for` does: making one takes ten times as long."""

    def __init__(self) -> None:
        self._bits = np.random.Philox(key=0)
        self._state = self._bits.state  # of a new generator
        self._generator = np.random.Generator(self._bits)

    def of(self, key: NDArray[np.uint64]) -> np.random.Generator:
        """Return the generator for a sample's key. The next call changes it."""
        self._state["state"]["key"] = key
        self._bits.state = self._state
        return self._generator


class _Own(threading.local):
    """What each thread has of its own."""

    def __init__(self) -> None:
        self.memory, self.generator = _ReusedMemory(), _ReusedGenerator()


_own = _Own()


class SampleMaker:
    """Makes samples of one data set's records.

    Args:
        url: of the data set, for error messages.
        transform: called with each record and a random generator; None if the records stay as they are.
        seed: of the random generators.
        decode: whether images are decoded.
        limits: the largest number of pixels.
    """

    def __init__(self, url: str, transform: Transform | None, seed: int, limits: Limits, *, decode: bool) -> None:
        self._url, self._seed, self._limits, self._decode = url, seed, limits, decode
        self.transform = transform
        # The check of the protocol takes as long as a small sample.
        self._crop = transform if decode and isinstance(transform, CropsFirst) else None
        self._only_crop = only_crop(transform) if decode else None

    @property
    def crops_first(self) -> bool:
        """Return whether samples are made faster by `begin`."""
        return self._crop is not None

    def begin(
        self,
        numbers: Sequence[int],
        epoch: int,
        draws: Sequence[int],
        source: Source,
        rows: Mapping[str, NDArray[Any]],
    ) -> list[Finish]:
        """Read records and decode their crops by one native call; return a function for each that returns the sample.

        An error of a sample is raised by its function.

        Args:
            numbers: the samples' numbers.
            epoch: 0 or more.
            draws: as for `generator_for`, one for each sample.
            source: of the records.
            rows: arrays (samples, ...) by field. A crop that fits into its row is decoded there if nothing else is made
                of it.
        """
        begun: list[tuple[RegionDecoding | None, Finish]] = []
        with _own.memory.group() as take:
            for number, draw, read in zip(numbers, draws, self._reading(source, numbers, take), strict=True):
                try:
                    begun.append(self._begun(number, epoch, draw, read()))
                except (DataError, OSError) as error:
                    begun.append((None, partial(_raise, error)))
            images = None if self._only_crop is None else rows.get(self._only_crop.field)
            pairs = [
                (decoding, None if images is None else images[row])
                for row, (decoding, _) in enumerate(begun)
                if decoding is not None
            ]
            decode_together([decoding for decoding, _ in pairs], [out for _, out in pairs])
        return [finish for _, finish in begun]

    def crop_rows(
        self, source: Source, numbers: Numbers, epoch: int, draws: Sequence[int], rows: Mapping[str, NDArray[Any]]
    ) -> dict[str, list[Any]] | None:
        """Make samples in the rows of a batch, if they are nothing but crops of JPEGs.

        Args:
            source: of the records.
            numbers: the samples' numbers, int64 (samples,).
            epoch: 0 or more.
            draws: as for `generator_for`, one for each sample.
            rows: arrays (samples, ...) by field.

        Returns:
            The values of the fields that have no array. None if the samples must be made one by one.

        Raises:
            DataError: a sample cannot be read.
        """
        crop, together = self._only_crop, getattr(source, "together", None)
        if crop is None or together is None or crop.field not in rows:
            return None
        images, arrays = rows[crop.field], {name: each for name, each in rows.items() if name != crop.field}
        with _own.memory.group() as take:
            found = together(crop.field, numbers, arrays, take)
            if found is None:
                return None
            wanted, mirrored = [], []
            shape = (crop.size, crop.size, 3)
            for row, image in enumerate(found.pop(crop.field)):
                size = size_of(image.data)
                if size is None or not 0 < size[0] * size[1] <= self._limits.pixels:
                    return None
                generator = _own.generator.of(_key_of(self._seed, epoch, int(numbers[row]), draws[row]))
                region = crop.region(*size, generator)
                if not region.is_in(*size) or images[row].shape != shape or images.dtype != np.uint8:
                    return None
                wanted.append(WantedRegion(image.data, size, region, images[row], is_sound=image.is_sound))
                if crop.mirrors(generator):
                    mirrored.append(row)
            if not all(decode_regions(wanted)):
                return None
        for row in mirrored:
            images[row] = images[row, :, ::-1].copy()
        return dict(found)

    def decoded(self, number: int, record: Record, but: str | None = None) -> Record:
        """Return the images of a record, decoded, by field; all but one.

        Raises:
            DataError: an image cannot be decoded.
        """
        return {
            name: decoded(self._named(number, record, name), bytes(value.data), self._limits)
            for name, value in record.items()
            if isinstance(value, Image) and name != but
        }

    def _reading(
        self, source: Source, numbers: Sequence[int], take: Callable[[int], memoryview]
    ) -> list[Callable[[], Record]]:
        """Return for each sample a function that returns its record; they are read by one call where possible."""
        together = getattr(source, "together", None)
        if self._crop is not None and together is not None:
            with suppress(DataError, OSError):  # read one by one, the sample that fails has a name
                found = together(self._crop.field, np.array(numbers, np.int64), None, take)
                if found is not None:
                    return [partial(dict, zip(found, each, strict=True)) for each in zip(*found.values(), strict=True)]
        return [partial(source.record, number) for number in numbers]

    def _begun(self, number: int, epoch: int, draw: int, record: Record) -> tuple[RegionDecoding | None, Finish]:
        """Return the crop to decode, if there is one, and the function that returns the sample when it is decoded."""
        crop = self._crop
        if crop is None or not isinstance(record.get(crop.field), Image):
            return None, partial(self._transformed, number, epoch, draw, record)
        record |= self.decoded(number, record, but=crop.field)
        generator = generator_for(self._seed, epoch, number, draw)

        def choose(height: int, width: int) -> Region:
            with self._of_transform(number, record):
                return crop.region(height, width, generator)

        name = self._named(number, record, crop.field)
        decoding = RegionDecoding(name, record[crop.field], self._limits, choose)
        return decoding, partial(self._cropped, number, record, crop, generator, decoding)

    def _cropped(
        self, number: int, record: Record, crop: CropsFirst, generator: np.random.Generator, decoding: RegionDecoding
    ) -> Record:
        image, region = decoding.result()
        with self._of_transform(number, record):
            made = crop.finish(record | {crop.field: cut(image, region)}, generator)
        return self._record(number, record, made)

    def _transformed(self, number: int, epoch: int, draw: int, record: Record) -> Record:
        if self._decode:
            record |= self.decoded(number, record)
        if self.transform is None:
            return record
        with self._of_transform(number, record):
            made = self.transform(record, generator_for(self._seed, epoch, number, draw))
        return self._record(number, record, made)

    def _record(self, number: int, record: Record, made: Any) -> Record:
        """Return what the transform made of `record`, if it is a record."""
        if not isinstance(made, Mapping):
            raise DataError(
                f"{self._named(number, record)}: the transform returned {_shown(made)}: want the record, a dict of "
                "fields; a transform that changes the record in place returns it, too"
            )
        return made  # type: ignore[return-value] # any mapping works

    @contextmanager
    def _of_transform(self, number: int, record: Record) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            raise DataError(
                f"{self._named(number, record)}: the transform raised {type(error).__name__}: {error}"
            ) from error

    def _named(self, number: int, record: Record, field: str = "") -> str:
        name = record.get("name", record.get("key", ""))
        return f"{self._url}: sample {number}{f' ({name})' if name else ''}{f', {field}' if field else ''}"


def _shown(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def _raise(error: Exception) -> Record:
    raise error
