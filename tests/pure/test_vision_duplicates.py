"""Near duplicates are found among many as between two, copies are found, and other pictures are not."""

import io
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageEnhance

from multiring.vision import duplicates
from multiring.vision.duplicates import chained, connected, equal_groups, is_near, near_pairs
from multiring.vision.pictures import decode_picture
from multiring.vision.signatures import SIGNATURE_BYTES, signature_of

Pixels = np.ndarray[Any, np.dtype[np.uint8]]


def scene(seed: int, size: tuple[int, int] = (96, 128)) -> Pixels:
    """Return a picture of soft coloured discs and rectangles, (height, width, 3)."""
    random = np.random.default_rng(seed)
    height, width = size
    rows, columns = np.mgrid[:height, :width] / max(size)
    pixels = np.empty((height, width, 3))
    pixels[:] = random.uniform(60, 150, 3)
    for _ in range(9):
        y, x, radius = (*random.uniform(0, 1, 2), random.uniform(0.05, 0.25))
        if random.random() < 0.5:
            inside = np.clip(20 * (radius - np.hypot(rows - y, columns - x)), 0, 1)
        else:
            inside = np.clip(20 * (radius - np.maximum(abs(rows - y), abs(columns - x))), 0, 1)
        pixels += inside[:, :, None] * (random.uniform(20, 200, 3) - pixels)
    return pixels.astype(np.uint8)


def signed(pixels: Pixels) -> tuple[bytes, tuple[int, int]]:
    return signature_of(pixels), (pixels.shape[1], pixels.shape[0])


def copies(pixels: Pixels) -> dict[str, Pixels]:
    image = Image.fromarray(pixels)
    jpeg = io.BytesIO()
    image.save(jpeg, "JPEG", quality=40)
    return {
        "re-encoded": decode_picture("a", jpeg.getvalue()).pixels,
        "smaller": np.asarray(image.resize((image.width // 2, image.height // 2))),
        "larger": np.asarray(image.resize((image.width * 3 // 2, image.height * 3 // 2))),
        "brighter": np.asarray(ImageEnhance.Brightness(image).enhance(1.3)),
        "darker": np.asarray(ImageEnhance.Brightness(image).enhance(0.7)),
    }


def test_a_signature_is_the_mean_of_cells() -> None:
    pixels = np.zeros((64, 96, 3), np.uint8)
    pixels[:, 48:] = (0, 0, 200)
    found = np.frombuffer(signature_of(pixels), np.uint8)
    assert len(found) == SIGNATURE_BYTES
    luma, blue, red = found[:1024].reshape(32, 32), found[1024:1088].reshape(8, 8), found[1088:].reshape(8, 8)
    assert (luma[:, :16] == 0).all()
    assert (luma[:, 16:] == round(0.114 * 200)).all()
    assert (blue[:, 4:] == 228).all()  # 128 + 0.564 * (200 - 22.8)
    assert (red[:, 4:] == 112).all()  # 128 - 0.713 * 22.8
    assert (blue[:, :4] == 128).all()


def test_a_signature_takes_any_size() -> None:
    # A picture that is repeated along both axes has the same cells.
    small = scene(1, (7, 5))
    large = np.repeat(np.repeat(small, 32, axis=0), 32, axis=1)
    difference = np.frombuffer(signature_of(small), np.uint8).astype(int) - np.frombuffer(signature_of(large), np.uint8)
    assert np.abs(difference).max() <= 1
    wide = np.repeat(scene(2, (4, 3)), 30000, axis=1)  # several bands
    assert len(signature_of(wide)) == SIGNATURE_BYTES
    assert len(signature_of(np.zeros((1, 1, 3), np.uint8))) == SIGNATURE_BYTES


@pytest.mark.parametrize("kind", ["re-encoded", "smaller", "larger", "brighter", "darker"])
def test_copies_are_found(kind: str) -> None:
    found = [is_near(*_pair(signed(scene(seed)), signed(copies(scene(seed))[kind]))) for seed in range(40)]
    assert sum(found) >= 38


def _pair(one: tuple[bytes, tuple[int, int]], other: tuple[bytes, tuple[int, int]]) -> tuple[Any, ...]:
    return one[0], other[0], one[1], other[1]


def test_other_pictures_are_not_flagged() -> None:
    made = [signed(scene(seed)) for seed in range(150)]
    assert len(near_pairs([each[0] for each in made], [each[1] for each in made]).first) <= 1


def test_flat_pictures_other_colours_and_other_shapes_are_not_flagged() -> None:
    for level in (10, 11):
        noise = np.random.default_rng(level).integers(level, level + 2, (40, 40, 3)).astype(np.uint8)
        assert not is_near(*_pair(signed(noise), signed(noise + 1)))
    pixels = scene(4)
    swapped = np.ascontiguousarray(pixels[:, :, ::-1])
    swapped[..., 1] = 255 - pixels[..., 1]
    assert not is_near(*_pair(signed(pixels), signed(swapped)))
    stretched = np.asarray(Image.fromarray(pixels).resize((128, 128)))
    assert not is_near(*_pair(signed(pixels), signed(stretched)))


def test_small_pictures_need_more() -> None:
    """The same cells are near duplicates of a large picture, and not of a small one."""
    found = []
    for seed in range(60):
        changed = scene(seed).astype(int)
        changed[30:60, 40:80] += 40
        one, other = (signature_of(each.clip(0, 255).astype(np.uint8)) for each in (scene(seed), changed))
        found.append((is_near(one, other, (128, 96), (128, 96)), is_near(one, other, (32, 24), (32, 24))))
    assert (True, False) in found
    assert (False, True) not in found


def test_pairs_among_many_are_those_of_all_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    made = [signed(scene(seed)) for seed in range(12)]
    made += [signed(each) for seed in range(0, 12, 3) for each in copies(scene(seed)).values()]
    random = np.random.default_rng(5)
    made = [made[at] for at in random.permutation(len(made))]
    brute = [(i, j) for i, j in combinations(range(len(made)), 2) if is_near(*_pair(made[i], made[j]))]
    assert len(brute) > 20
    for block in (1, 7, 1024):
        monkeypatch.setattr(duplicates, "_BLOCK", block)
        found = near_pairs([each[0] for each in made], [each[1] for each in made])
        assert list(zip(found.first.tolist(), found.second.tolist(), strict=True)) == brute
        assert ((found.similarity > 0.5) & (found.similarity <= 1.0001)).all()
    assert not len(near_pairs([], []).first)


def test_groups_of_equal_keys() -> None:
    assert equal_groups(["a", "b", None, "a", None, "c", "b", "a"]) == [(0, 3, 7), (1, 6)]
    assert not equal_groups([])


@pytest.mark.parametrize("seed", range(20))
def test_connected_groups_are_those_of_repeated_merging(seed: int) -> None:
    random = np.random.default_rng(seed)
    count = int(random.integers(1, 30))
    links = [tuple(random.integers(0, count, 2).tolist()) for _ in range(int(random.integers(0, 30)))]
    groups = [{each} for each in range(count)]
    for one, other in links:
        merged = [each for each in groups if one in each or other in each]
        groups = [each for each in groups if each not in merged] + [set().union(*merged)]
    assert connected(count, links) == sorted(tuple(sorted(each)) for each in groups)
    assert connected(count, chained(groups_ := [sorted(each) for each in groups])) == sorted(map(tuple, groups_))
