"""A crop of a JPEG has the pixels of decode-then-crop, whatever the file is like."""

import io
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import simplejpeg
from PIL import Image as Pillow

from multiring.data import Dataset, Loader
from multiring.data.augment import CenterCrop, CropsFirst, RandomCrop, RandomResizedCrop
from multiring.data.decoding import RegionDecoding, decode_together, decoded
from multiring.data.feeding.batches import fill, layout_of
from multiring.data.feeding.wanted import WantedSamples
from multiring.data.jpeg import Region, WantedRegion, decode_regions, is_available, size_of
from multiring.data.packing.writing import PackOptions, pack
from multiring.data.readers.limits import Limits
from multiring.data.readers.source import Image
from multiring.errors import ArgumentError, DataError

HEADERS = Path("/usr/include/jpeglib.h")
SAMPLINGS = ("444", "422", "420", "440", "411", "Gray")
needs_regions = pytest.mark.skipif(not is_available(), reason="built without libjpeg-turbo")


def test_a_build_beside_the_headers_decodes_regions() -> None:
    assert is_available() or not HEADERS.exists()


def pixels(generator: np.random.Generator, height: int, width: int) -> Any:
    coarse = generator.integers(0, 255, (max(1, height // 5), max(1, width // 7), 3), dtype=np.uint8)
    image = np.asarray(Pillow.fromarray(coarse).resize((width, height))).astype(np.int64)
    return (image + generator.integers(-20, 20, image.shape)).clip(0, 255).astype(np.uint8)


def jpeg(generator: np.random.Generator, height: int, width: int) -> bytes:
    """Return a JPEG of one of all kinds: samplings, grey, progressive."""
    image, quality = pixels(generator, height, width), int(generator.integers(30, 98))
    sampling = str(generator.choice(SAMPLINGS))
    if generator.random() < 0.3 and sampling in SAMPLINGS[:3]:
        file = io.BytesIO()
        Pillow.fromarray(image).save(file, "JPEG", quality=quality, progressive=True, subsampling=sampling[0] == "4")
        return file.getvalue()
    if sampling == "Gray":
        grey = image[:, :, :1].copy()
        return bytes(simplejpeg.encode_jpeg(grey, quality=quality, colorspace="Gray", colorsubsampling="Gray"))
    return bytes(simplejpeg.encode_jpeg(image, quality=quality, colorsubsampling=sampling))


def region_of(data: bytes, size: tuple[int, int], region: Region, *, is_sound: bool = False) -> Any:
    """Return a region that is decoded alone, or None if the file is damaged."""
    pixels = np.full((region.height, region.width, 3), 7, np.uint8)
    (found,) = decode_regions([WantedRegion(data, size, region, pixels, is_sound=is_sound)])
    return pixels if found else None


def decoded_region(image: Image, region: Region) -> tuple[Any, Region]:
    """Return what a data set gets for a region of an image."""
    decoding = RegionDecoding("it", image, Limits(), lambda height, width: region)  # noqa: ARG005
    decode_together([decoding], [None])
    return decoding.result()


@needs_regions
def test_the_pixels_are_those_of_the_whole_picture() -> None:
    generator = np.random.default_rng(1)
    for _ in range(60):
        height, width = (int(each) for each in generator.integers(1, 160, 2))
        data = jpeg(generator, height, width)
        whole = decoded("it", data, Limits())
        assert size_of(data) == (height, width)
        for _ in range(8):
            top, left = int(generator.integers(height)), int(generator.integers(width))
            rows, columns = int(generator.integers(height - top)) + 1, int(generator.integers(width - left)) + 1
            found = region_of(data, (height, width), Region(top, left, rows, columns))
            assert found is not None
            np.testing.assert_array_equal(found, whole[top : top + rows, left : left + columns])


@needs_regions
def test_a_crop_of_a_file_that_lacks_scans_is_cut_from_the_whole_picture() -> None:
    """The library guesses what the scans would have brought, from blocks that a crop may not have."""
    generator = np.random.default_rng(7)
    alone = 0
    for subsampling in (0, 2):
        file = io.BytesIO()
        Pillow.fromarray(pixels(generator, 96, 120)).save(file, "JPEG", progressive=True, subsampling=subsampling)
        scans = file.getvalue().split(b"\xff\xda")
        assert len(scans) > 6
        for kept in range(2, len(scans) + 1):
            data = b"\xff\xda".join(scans[:kept]) + b"\xff\xd9" * (kept < len(scans))
            whole = decoded("it", data, Limits())
            for top, left in ((0, 0), (33, 41), (16, 64)):
                region = Region(top, left, 40, 50)
                alone += region_of(data, (96, 120), region) is not None
                image, place = decoded_region(Image(data), region)
                found = image[place.top : place.top + 40, place.left : place.left + 50]
                np.testing.assert_array_equal(found, whole[top : top + 40, left : left + 50])
    assert alone == 2 * 3  # the regions of the complete files


@needs_regions
def test_a_region_beside_the_picture_is_none() -> None:
    data = jpeg(np.random.default_rng(2), 40, 50)
    for region in (Region(-1, 0, 5, 5), Region(0, 46, 5, 5), Region(0, 0, 41, 5), Region(3, 3, 0, 5)):
        with pytest.raises(ValueError, match="exceeds an image of"):
            region_of(data, (40, 50), region)
    # Not the picture's size: the library refuses it.
    assert region_of(data, (100, 100), Region(0, 46, 5, 5)) is None
    assert region_of(data, (100, 100), Region(0, 0, 41, 5)) is None


@needs_regions
def test_an_array_that_does_not_fit_is_refused() -> None:
    data = jpeg(np.random.default_rng(2), 40, 50)
    wrong: Any
    for wrong in (np.empty((5, 5), np.uint8), np.empty((5, 5, 3), np.int8), np.empty((5, 10, 3), np.uint8)[:, ::2]):
        with pytest.raises(ValueError, match="want uint8"):
            decode_regions([WantedRegion(data, (40, 50), Region(0, 0, 5, 5), wrong)])


class Later:
    """A transform that hides that it begins with a crop."""

    def __init__(self, transform: Any) -> None:
        self._transform = transform

    def __call__(self, record: dict[str, Any], generator: np.random.Generator) -> dict[str, Any]:
        return dict(self._transform(record, generator))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures larger and smaller than the crops, one of them a PNG, and one in colours that Pillow converts."""
    place = tmp_path_factory.mktemp("pictures")
    (place / "a").mkdir()
    generator = np.random.default_rng(3)
    for number in range(12):
        height, width = (int(each) for each in generator.integers(1, 120, 2))
        (place / "a" / f"{number:02}.jpg").write_bytes(jpeg(generator, height, width))
    Pillow.fromarray(pixels(generator, 90, 80)).save(place / "a" / "90.png")
    Pillow.fromarray(pixels(generator, 90, 80)).convert("CMYK").save(place / "a" / "91.jpg")
    return place


def brightened(record: dict[str, Any], generator: np.random.Generator) -> dict[str, Any]:
    return {"x": record["image"] // 2, "draw": int(generator.integers(1 << 30)), "label": record["label"]}


@pytest.mark.parametrize(
    "crop",
    [
        RandomCrop(32),
        RandomCrop(48, mirrored=True, then=brightened),
        CenterCrop(40),
        CenterCrop(24, then=brightened),
        RandomResizedCrop(32, mirrored=True),
        RandomResizedCrop(20, scale=(0.9, 1.0), ratio=(5.0, 6.0), then=brightened),
    ],
    ids=["random", "mirrored", "centre", "centre then", "resized", "narrow"],
)
def test_a_data_set_gives_what_decode_then_crop_gives(crop: Callable[..., Any], folder: Path) -> None:
    later_crop: object = Later(crop)
    assert isinstance(crop, CropsFirst) and not isinstance(later_crop, CropsFirst)  # noqa: PT018
    first, later = Dataset(folder, transform=crop, seed=5), Dataset(folder, transform=Later(crop), seed=5)
    for number in range(len(first)):
        for epoch in range(4):
            mine, theirs = first.sample(number, epoch), later.sample(number, epoch)
            assert mine.keys() == theirs.keys()
            for name, value in mine.items():
                np.testing.assert_array_equal(value, theirs[name])


def twice(record: dict[str, Any], generator: np.random.Generator) -> dict[str, Any]:
    """Return the crop itself behind a field that is made of it."""
    return {"image": record["image"] // 2, "crop": record["image"], "draw": int(generator.integers(9))}


@pytest.fixture(scope="module", params=["files", "sound", "unchecked"])
def place(request: pytest.FixtureRequest, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pictures as files, and in a pack that knows that they are sound, or does not."""
    if request.param == "files":
        return folder
    data, made = Dataset(folder, shuffle="none", decode=False), tmp_path_factory.mktemp("packs") / "pack"
    check = data.require_decodable if request.param == "sound" else None
    pack(data.source, len(data), made, PackOptions(check=check), lambda *_: None)
    return made


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    "crop",
    [
        RandomCrop(32),
        RandomCrop(32, mirrored=True),
        RandomCrop(48, mirrored=True, then=brightened),
        RandomCrop(32, then=twice),
        RandomResizedCrop(32, mirrored=True),
    ],
    ids=["random", "mirrored", "then", "twice", "resized"],
)
def test_batches_have_the_pixels_of_decode_then_crop(crop: Callable[..., Any], place: Path, workers: int) -> None:
    batches: list[list[dict[str, Any]]] = []
    for each in (crop, Later(crop)):
        loader = Loader(Dataset(place, transform=each, seed=5), 7, workers=workers)
        batches.append([{name: np.array(value) for name, value in batch.items()} for _ in range(3) for batch in loader])
    assert len(batches[0]) == len(batches[1]) == 6
    for mine, theirs in zip(*batches, strict=True):
        assert mine.keys() == theirs.keys()
        for name, value in mine.items():
            np.testing.assert_array_equal(value, theirs[name])


@needs_regions
@pytest.mark.parametrize("shuffle", ["none", "exact"])
@pytest.mark.parametrize("crop", [RandomCrop(32), RandomCrop(40, mirrored=True), CenterCrop(24)])
def test_crops_of_a_pack_are_decoded_into_the_batch(
    crop: Any, shuffle: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = np.random.default_rng(8)
    for label in "ab":
        (tmp_path / "files" / label).mkdir(parents=True)
        for number in range(35):
            height, width = (int(each) for each in generator.integers(40, 90, 2))
            (tmp_path / "files" / label / f"{number:02}.jpg").write_bytes(jpeg(generator, height, width))
    stored = Dataset(tmp_path / "files", shuffle="none", decode=False)
    pack(stored.source, 70, tmp_path / "pack", PackOptions(shard_bytes=1 << 16), lambda *_: None)
    made: list[int] = []
    rows_of = Dataset.crops_rows

    def counted(self: Dataset, numbers: Any, *rest: Any) -> Any:
        found = rows_of(self, numbers, *rest)
        made.append(0 if found is None else len(numbers))
        return found

    monkeypatch.setattr(Dataset, "crops_rows", counted)
    batches: list[list[dict[str, Any]]] = []
    for each in (crop, Later(crop)):
        loader = Loader(Dataset(tmp_path / "pack", transform=each, seed=5, shuffle=shuffle), 40, workers=2)
        batches.append([{name: np.array(value) for name, value in batch.items()} for _ in range(2) for batch in loader])
    assert sum(made) == 140
    for mine, theirs in zip(*batches, strict=True):
        assert mine.keys() == theirs.keys() == {"image", "label", "name"}
        for name, value in mine.items():
            np.testing.assert_array_equal(value, theirs[name])
        assert {kind.dtype for kind in (mine["label"], theirs["label"])} == {np.dtype(np.int64)}


class Reading(RandomCrop):
    """A crop that reads another sample before it chooses its region, as one does that mixes two samples."""

    __slots__ = ("other",)

    def region(self, height: int, width: int, generator: np.random.Generator) -> Region:
        found: Any = self.other  # type: ignore[attr-defined] # set by the test
        found.sample(int(generator.integers(len(found))), 3)
        return RandomCrop.region(self, height, width, generator)


def test_samples_that_are_read_while_others_are_made_change_nothing(place: Path) -> None:
    crop, other = Reading(32), Dataset(place, transform=RandomCrop(16), seed=9)
    object.__setattr__(crop, "other", other)
    first, later = (Dataset(place, transform=each, seed=5) for each in (crop, Later(crop)))
    numbers = list(range(len(first)))
    found: Any = first.begin_samples(numbers, 2, [0] * len(numbers), {})
    for number, finish in zip(numbers, found, strict=True):
        np.testing.assert_array_equal(finish()["image"], later.sample(number, 2)["image"])


@pytest.mark.parametrize("crop", [RandomCrop(24), RandomCrop(24, mirrored=True), RandomResizedCrop(24), CenterCrop(90)])
def test_groups_of_samples_may_be_finished_in_any_order(crop: Callable[..., Any], place: Path) -> None:
    data, later = Dataset(place, transform=crop, seed=5), Dataset(place, transform=Later(crop), seed=5)
    numbers = list(range(len(data)))
    groups: list[Any] = [data.begin_samples(numbers, epoch, [0] * len(numbers), {}) for epoch in range(3)]
    for epoch in (1, 2, 0):
        for number, finish in zip(numbers, groups[epoch], strict=True):
            np.testing.assert_array_equal(finish()["image"], later.sample(number, epoch)["image"])


@pytest.mark.parametrize("is_packed", [False, True])
def test_in_a_batch_a_damaged_file_is_named_and_the_others_keep_their_pixels(
    *, is_packed: bool, tmp_path: Path
) -> None:
    (tmp_path / "files" / "a").mkdir(parents=True)
    generator = np.random.default_rng(6)
    files = [bytes(simplejpeg.encode_jpeg(pixels(generator, 60, 70))) for _ in range(40)]
    for number, file in enumerate(files):
        # One has lost its middle, and one its whole content.
        kept = {11: file[:700] + file[1400:], 35: b""}.get(number, file)
        (tmp_path / "files" / "a" / f"{number:02}.jpg").write_bytes(kept)
    stored = Dataset(tmp_path / "files", shuffle="none", decode=False)
    pack(stored.source, 40, tmp_path / "pack", PackOptions(), lambda *_: None)
    data = Dataset(tmp_path / ("pack" if is_packed else "files"), transform=CenterCrop(48), shuffle="none")
    wanted = WantedSamples(epoch=0, numbers=np.arange(40))
    layout = layout_of(data.sample(0))
    rows = {name: np.zeros((42, *shape), kind) for name, (shape, kind) in layout.arrays.items()}
    filled = fill(data, layout, rows, 1, wanted)
    assert [(each.row, each.number) for each in filled.failures] == [(12, 11), (36, 35)]
    assert all(
        (f"sample {each.number}" if is_packed else f"{each.number}.jpg") in each.text for each in filled.failures
    )
    for number in set(range(40)) - {11, 35}:
        whole = simplejpeg.decode_jpeg(files[number])
        np.testing.assert_array_equal(rows["image"][1 + number], whole[6:54, 11:59])
    assert not rows["image"][[0, 41]].any()
    assert len(filled.lists["name"]) == 40


def test_other_images_of_a_record_are_whole_and_undecoded_ones_stay_so(folder: Path) -> None:
    data: Any = Dataset(folder, transform=CenterCrop(8), shuffle="none")
    source = data.source
    data.source = SimpleNamespace(
        record=lambda number: source.record(number) | {"mask": source.record(number)["image"]}
    )
    found = data.sample(0)
    assert found["image"].shape == (8, 8, 3)
    assert found["mask"].shape == decoded("it", source.record(0)["image"].data, Limits()).shape
    kept = Dataset(folder, decode=False, transform=lambda record, _: record)
    assert kept.sample(0)["image"].data == source.record(0)["image"].data


def test_an_error_of_the_crop_names_the_sample(folder: Path) -> None:
    class Failing(CenterCrop):
        def region(self, height: int, width: int, generator: np.random.Generator) -> Region:  # noqa: ARG002
            raise RuntimeError(f"of {height} x {width}")

    with pytest.raises(DataError, match=r"00\.jpg.*the transform raised RuntimeError: of \d+ x \d+"):
        Dataset(folder, transform=Failing(8), shuffle="none").sample(0)


@pytest.mark.parametrize("bounds", [{"scale": (0.5, 0.2)}, {"scale": (0, 1)}, {"scale": (0.5, 2)}, {"ratio": (2, 1)}])
def test_impossible_bounds_are_refused(bounds: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match="want two"):
        RandomResizedCrop(8, **bounds)


def test_a_claimed_size_is_checked_before_decoding() -> None:
    data = bytearray(simplejpeg.encode_jpeg(np.zeros((32, 32, 3), np.uint8)))
    place = data.index(b"\xff\xc0") + 5
    data[place : place + 4] = b"\xff\xdc\xff\xdc"  # 65500, the most of libjpeg
    with pytest.raises(DataError, match="claims 65500 x 65500 pixels"):
        decoded_region(Image(bytes(data)), Region(0, 0, 8, 8))


def test_damaged_files_are_refused_as_if_they_were_decoded_whole() -> None:
    generator = np.random.default_rng(4)
    refused = 0
    for _ in range(400):
        height, width = (int(each) for each in generator.integers(16, 90, 2))
        sound = jpeg(generator, height, width)
        data = bytearray(sound)
        place = int(generator.integers(2, len(data)))
        if generator.random() < 0.4:
            del data[place:]
        else:
            data[place : place + int(generator.integers(1, 5))] = generator.bytes(int(generator.integers(0, 5)))
        region = Region(height // 4, width // 4, height // 2, width // 2)
        try:
            image, place_in = decoded_region(Image(bytes(data)), region)
        except DataError as error:
            refused += str(error).startswith("it ")
            continue
        whole = decoded("it", bytes(data), Limits())  # it does not raise an error, either
        if region.is_in(*whole.shape[:2]):
            mine = image[place_in.top : place_in.top + region.height, place_in.left : place_in.left + region.width]
            theirs = whole[region.top : region.top + region.height, region.left : region.left + region.width]
            np.testing.assert_array_equal(mine, theirs)
    assert refused > 100


@pytest.mark.parametrize("decodes", [True, False])
def test_a_pack_knows_whether_its_images_were_decoded(*, decodes: bool, folder: Path, tmp_path: Path) -> None:
    data = Dataset(folder, shuffle="none", decode=False)
    options = PackOptions(check=data.require_decodable if decodes else None)
    manifest = pack(data.source, len(data), tmp_path / "pack", options, lambda *_: None)
    assert ('"decoded"' in manifest.text()) == decodes  # packs of older versions keep their digest
    packed = Dataset(tmp_path / "pack", shuffle="none")
    assert packed.source.record(0)["image"].is_sound == decodes
    np.testing.assert_array_equal(packed.sample(0)["image"], Dataset(folder, shuffle="none").sample(0)["image"])
    cropped = Dataset(tmp_path / "pack", shuffle="none", transform=CenterCrop(9))
    for number in range(len(data)):
        np.testing.assert_array_equal(
            cropped.sample(number)["image"],
            Dataset(folder, shuffle="none", transform=Later(CenterCrop(9))).sample(number)["image"],
        )


@needs_regions
def test_of_a_sound_file_nothing_behind_the_region_is_read() -> None:
    data = simplejpeg.encode_jpeg(pixels(np.random.default_rng(6), 96, 96))
    region, cropped = Region(0, 0, 8, 8), data[: len(data) // 2]
    whole = decoded("it", data, Limits())
    found = region_of(cropped, (96, 96), region, is_sound=True)
    assert found is not None
    np.testing.assert_array_equal(found, whole[:8, :8])
    assert region_of(cropped, (96, 96), region) is None
