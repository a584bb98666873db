"""The rules that carry a learning rate to another width, from shapes."""

from typing import Any

import pytest

from multiring.convergence import width_rules
from multiring.errors import ArgumentError

NARROW = {
    "first": (64, 10),
    "bias": (64,),
    "middle": (64, 64),
    "kernel": (64, 64, 3, 3),
    "last": (5, 64),
    "fixed": (5,),
}
FULL = {
    "first": (256, 10),
    "bias": (256,),
    "middle": (256, 256),
    "kernel": (256, 256, 3, 3),
    "last": (5, 256),
    "fixed": (5,),
}


@pytest.mark.parametrize(
    ("optimizer", "rates"),
    [("adam", (1, 1, 0.25, 0.25, 0.25, 1)), ("sgd", (4, 4, 1, 1, 0.25, 1))],
)
def test_the_published_table(optimizer: str, rates: tuple[float, ...]) -> None:
    rules = width_rules(NARROW, FULL, optimizer=optimizer)
    assert [each.kind for each in rules.values()] == ["input", "input", "hidden", "hidden", "output", "fixed"]
    assert tuple(each.rate for each in rules.values()) == rates
    assert [each.deviation for each in rules.values()] == [1, 1, 0.5, 0.5, 0.25, 1]
    assert all(each.rate * each.decay == 1 for each in rules.values())
    assert not rules.doubts
    assert "middle  hidden        0.25        0.5" in str(width_rules(NARROW, FULL))


def test_axes_of_embeddings() -> None:
    narrow, full = {**NARROW, "words": (100, 64)}, {**FULL, "words": (100, 256)}
    assert width_rules(narrow, full)["words"].kind == "output"
    assert width_rules(narrow, full, axes={"words": (1, 0)})["words"].kind == "input"
    stacked = {**NARROW, "stack": (7, 64, 64)}, {**FULL, "stack": (7, 256, 256)}
    assert width_rules(*stacked, axes={"stack": (1, 2)})["stack"].kind == "hidden"
    assert width_rules({**NARROW, "a": (1, 9, 64)}, {**FULL, "a": (1, 9, 256)}, axes={"a": (2, None)})["a"].rate == 1


@pytest.mark.parametrize(
    ("narrow", "full", "doubt"),
    [
        ({"a": (8, 3), "b": (2, 8)}, {"a": (32, 3), "b": (2, 32)}, "a width of 8 is narrow"),
        ({"a": (64, 3), "b": (2, 64)}, {"a": (2048, 3), "b": (2, 2048)}, "grows 32-fold"),
        ({"a": (64, 3), "b": (2, 64)}, {"a": (32, 3), "b": (2, 32)}, "a width shrinks to 0.5"),
        ({"a": (64, 3), "b": (64, 64)}, {"a": (128, 3), "b": (128, 128)}, "as a last layer has"),
        (
            {"a": (64, 3), "b": (64, 64), "c": (2, 64)},
            {"a": (128, 3), "b": (256, 128), "c": (2, 256)},
            "not all widths grow by the same factor",
        ),
    ],
)
def test_doubts(narrow: Any, full: Any, doubt: str) -> None:
    found = width_rules(narrow, full)
    assert any(doubt in each for each in found.doubts), found.doubts
    assert f"doubt: {found.doubts[0]}" in str(found)


@pytest.mark.parametrize(
    ("narrow", "full", "options", "text"),
    [
        ({"a": (2, 2)}, {"b": (4, 4)}, {}, "parameter 'a' is in one of the networks only: want the same layers"),
        ({"a": (2, 2)}, {"a": (4,)}, {}, r"'a' has shapes \(2, 2\) and \(4,\): want as many axes"),
        ({"a": (2, 0)}, {"a": (4, 0)}, {}, "and no empty one"),
        ({"a": (2, 2)}, {"a": (2, 2)}, {}, "the same shapes: want a narrow one and a wider one"),
        ({"a": (2, 2, 3)}, {"a": (2, 2, 6)}, {}, r"in axis 2: want .* by axes={'a': \(outputs, inputs\)}"),
        ({"a": (2, 2)}, {"a": (4, 4)}, {"optimizer": "lamb"}, "optimizer='lamb': want 'adam' or 'sgd'"),
        ({"a": (2, 2)}, {"a": (4, 4)}, {"axes": {"x": (1, 0)}}, "axes of 'x': want names of parameters"),
    ],
)
def test_bad_shapes(narrow: Any, full: Any, options: Any, text: str) -> None:
    with pytest.raises(ArgumentError, match=text):
        width_rules(narrow, full, **options)
