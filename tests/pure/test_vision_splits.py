"""Splits keep units together, depend on the seed alone, and have the wanted shares as far as units allow."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multiring.errors import ArgumentError
from multiring.vision.splits import SplitUnit, split, split_digest

SHARES = {"train": 0.7, "val": 0.2, "test": 0.1}


@st.composite
def units(draw: st.DrawFn) -> list[SplitUnit]:
    sizes = draw(st.lists(st.integers(1, 6), min_size=3, max_size=25))
    made = []
    for number, size in enumerate(sizes):
        classes = draw(st.lists(st.sampled_from("abc"), max_size=size))
        made.append(SplitUnit(members=tuple(f"{number}/{each}" for each in range(size)), classes=tuple(classes)))
    return made


@given(units(), st.integers(0, 1 << 64), st.randoms(use_true_random=False))
def test_each_picture_is_in_one_part_with_its_unit(made: list[SplitUnit], seed: int, random: st.randoms) -> None:  # type: ignore[valid-type]
    parts = split(made, SHARES, seed)
    assert list(parts) == list(SHARES)
    assert sorted(key for keys in parts.values() for key in keys) == sorted(k for each in made for k in each.members)
    of = {key: part for part, keys in parts.items() for key in keys}
    assert all(len({of[key] for key in each.members}) == 1 for each in made)
    assert all(parts.values())
    shuffled = list(made)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert split(shuffled, SHARES, seed) == parts


def test_shares_of_pictures_and_classes() -> None:
    made = [SplitUnit(members=(f"p{n}",), classes=("rare" if n % 20 == 0 else "common",)) for n in range(1000)]
    parts = split(made, SHARES, 1)
    for part, share in SHARES.items():
        assert abs(len(parts[part]) - 1000 * share) <= 2
        assert abs(sum(int(key[1:]) % 20 == 0 for key in parts[part]) - 50 * share) <= 1
    assert split(made, SHARES, 2) != parts
    assert split_digest(split(made, SHARES, 2)) != split_digest(parts)
    assert split_digest(dict(reversed(parts.items()))) == split_digest(parts)


def test_a_known_split_does_not_change() -> None:
    made = [SplitUnit(members=(f"p{n}",)) for n in range(10)]
    assert split(made, {"train": 0.5, "test": 0.5}, 7)["test"] == ("p0", "p1", "p2", "p3", "p9")


@pytest.mark.parametrize(
    ("made", "shares", "words"),
    [
        ([("a",), ("b",)], {"train": 0.5, "test": 0.4}, "numbers above 0 that add up to 1"),
        ([("a",), ("b",)], {"train": 1.0, "test": 0.0}, "numbers above 0 that add up to 1"),
        ([("a",), ("b",)], {"train": float("nan"), "test": float("nan")}, "numbers above 0 that add up to 1"),
        ([("a",), ("b",)], {"train": 0.5, "test": float("nan")}, "numbers above 0 that add up to 1"),
        ([("a",), ("b",)], {}, "numbers above 0 that add up to 1"),
        ([("a",), ("b", "a")], {"train": 0.5, "test": 0.5}, "picture 'a' is in 2 units"),
        ([("a", "b", "c")], {"train": 0.5, "test": 0.5}, "1 independent groups of pictures for 2 parts"),
    ],
)
def test_what_cannot_be_split(made: list[tuple[str, ...]], shares: dict[str, float], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        split([SplitUnit(members=each) for each in made], shares, 0)
