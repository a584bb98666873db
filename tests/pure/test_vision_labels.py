"""Labels as values, and sets of pixels as run lengths."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from multiring.errors import DataError
from multiring.vision import Box, Label, Mask, Polygon, RunLengths, run_lengths_of
from multiring.vision.labels import from_json, outside, require_label, to_json
from multiring.vision.run_lengths import compressed, decompressed, joined_runs

SMALL = st.integers(1, 9)


@st.composite
def masks(draw: st.DrawFn) -> np.ndarray[Any, np.dtype[np.bool_]]:
    height, width = draw(SMALL), draw(SMALL)
    bits = draw(st.lists(st.booleans(), min_size=height * width, max_size=height * width))
    return np.array(bits, bool).reshape(height, width)


@given(masks())
def test_run_lengths_hold_the_pixels(pixels: np.ndarray[Any, np.dtype[np.bool_]]) -> None:
    runs = run_lengths_of(pixels)
    assert (runs.pixels() == pixels).all()
    assert runs.area() == pixels.sum()
    rows, columns = np.nonzero(pixels)
    wanted = (columns.min(), rows.min(), columns.max() + 1, rows.max() + 1) if len(rows) else (0, 0, 0, 0)
    assert runs.bounds() == wanted
    assert decompressed(compressed(runs.runs)) == list(runs.runs)


@given(st.lists(st.integers(0, 1 << 34), max_size=12))
def test_compression_is_reversible(counts: list[int]) -> None:
    assert decompressed(compressed(tuple(counts))) == counts


def test_compressed_text_is_that_of_coco() -> None:
    # The texts are what pycocotools 2.0.11 wrote for the same pixels.
    pixels = np.zeros((4, 5), bool)
    pixels[1:3, 1:4] = True
    assert compressed(run_lengths_of(pixels).runs) == "5220003"
    pixels = np.zeros((100, 120), bool)
    pixels[10:90, 20:100] = pixels[40:45, 3:9] = True
    text = compressed(run_lengths_of(pixels).runs)
    assert text == "d:5o2000000000^Q1[2WlN" + "0" * 157 + "Vn1"
    assert joined_runs(120, 100, decompressed(text)) == run_lengths_of(pixels)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=12))
def test_counts_with_zeros_become_run_lengths(counts: list[int]) -> None:
    total = sum(counts)
    if not total:
        counts, total = [*counts, 1], 1
    values = np.repeat(np.arange(len(counts)) % 2 == 1, counts)
    assert joined_runs(1, total, counts) == run_lengths_of(values.reshape(-1, 1))


@pytest.mark.parametrize(
    ("runs", "words"),
    [((3,), "add up to 3: want 2 x 2 = 4"), ((2, 0, 2), "above 0"), ((-1, 5), "above 0"), ((), "add")],
)
def test_other_run_lengths_are_refused(runs: tuple[int, ...], words: str) -> None:
    with pytest.raises(DataError, match=words):
        RunLengths(width=2, height=2, runs=runs)


@pytest.mark.parametrize("text", ["\x10", "5é", "zzzzzzzzzzzzzz", "o"])
def test_other_compressed_text_is_refused(text: str) -> None:
    with pytest.raises(DataError, match="compressed run lengths"):
        decompressed(text)


LABELS = (
    Label(class_name="Ä / b", track="t", attributes=(("difficult", "1"),)),
    Box(class_name="a", left=0.25, top=1, width=3, height=2.5),
    Polygon(class_name="a", outlines=(((0, 0), (1.5, 0), (1, 1)), ((2, 2), (3, 2), (3, 3), (2, 3)))),
    Mask(class_name="a", pixels=RunLengths(width=2, height=2, runs=(0, 1, 3)), is_crowd=True),
)


@pytest.mark.parametrize("label", LABELS)
def test_json_holds_a_label(label: Label) -> None:
    require_label(label)
    assert from_json(json.loads(json.dumps(to_json(label)))) == label


@pytest.mark.parametrize(
    "told", [{}, {"class": "a", "box": [1, 2]}, {"class": "a", "polygon": [[1]]}, {"class": "a", "mask": {"runs": []}}]
)
def test_other_json_is_refused(told: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=r"label .* is malformed"):
        from_json(told)


@pytest.mark.parametrize(
    ("label", "words"),
    [
        (Label(class_name=" "), "class ' ': want a name"),
        (Box(class_name="a", left=0, top=0, width=0, height=1), "box of 0 x 1 pixels"),
        (Box(class_name="a", left=0, top=0, width=float("nan"), height=1), "box of nan x 1"),
        (Box(class_name="a", left=float("inf"), top=0, width=1, height=1), "coordinate inf"),
        (Polygon(class_name="a", outlines=()), "at least one outline"),
        (Polygon(class_name="a", outlines=(((0, 0), (1, 1)),)), "three points"),
        (Mask(class_name="a", pixels=RunLengths(width=1, height=1, runs=(1,))), "mask without a pixel"),
    ],
)
def test_a_malformed_label_is_refused(label: Label, words: str) -> None:
    with pytest.raises(DataError, match=words):
        require_label(label)


def test_outside_says_how() -> None:
    assert not outside(LABELS[0], 1, 1)
    assert not outside(LABELS[1], 4, 4)
    assert outside(LABELS[1], 2, 4) == "box from (0.25, 1) to (3.25, 3.5) on a picture of 2 x 4 pixels"
    assert outside(LABELS[2], 3, 2) == "polygon from (0, 0) to (3, 3) on a picture of 3 x 2 pixels"
    assert outside(LABELS[3], 3, 2) == "mask of 2 x 2 on a picture of 3 x 2 pixels"
    assert not outside(LABELS[3], 2, 2)
