"""Wrong values are refused by the call that gets them, in a sentence: not later, and not taken for others."""

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.bad_values import Case, require_refused

from multiring._arguments import is_number, require_choice, require_number, require_numbers, require_whole, whole
from multiring.convergence import Constant, Cosine, Polynomial, Steps, Warmup
from multiring.data import (
    ArrayDataset,
    BlockCache,
    Dataset,
    ElasticOrder,
    Limits,
    Loader,
    Mixture,
    Shuffle,
    Workers,
    cached,
    merge_batches,
    open_storage,
    seed_for,
    shard_batch,
)
from multiring.data.augment import CenterCrop, RandomCrop, RandomResizedCrop
from multiring.errors import ArgumentError, DataError
from multiring.vision.labels import Box, Mask, Polygon, from_json, require_label, to_json
from multiring.vision.run_lengths import RunLengths, run_lengths_of
from multiring.vision.serving.limits import ServerLimits
from multiring.vision.splits import SplitUnit, split

COUNT = 12
ARRAYS = {"x": np.arange(2.0 * COUNT).reshape(COUNT, 2)}


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bad values") / "a.npy"
    np.save(path, ARRAYS["x"])
    return path


def data_cases(path: Path) -> Iterator[Case]:
    samples, data = ArrayDataset(ARRAYS), Dataset(path)
    yield Case(
        title="Loader",
        call=Loader,
        arguments={
            "samples": samples,
            "batch": 4,
            "rank": 0,
            "ranks": 1,
            "workers": 1,
            "drop_last": False,
            "skip_bad": True,
            "allocate": None,
        },
        kinds={
            "samples": "data set",
            "batch": "count",
            "rank": "from zero",
            "ranks": "count",
            "workers": "count",
            "drop_last": "flag",
            "skip_bad": "flag",
            "allocate": "function or None",
        },
    )
    yield Case(
        title="Workers",
        call=Workers,
        arguments={"count": 2, "processes": False, "ahead": 2, "context": "spawn"},
        kinds={"count": "count", "processes": "flag", "ahead": "count", "context": "choice"},
    )
    yield Case(
        title="ArrayDataset",
        call=ArrayDataset,
        arguments={"arrays": ARRAYS, "seed": 1, "shuffle": True},
        kinds={"arrays": "data set", "seed": "seed", "shuffle": "flag"},
    )
    yield Case(
        title="Dataset",
        call=Dataset,
        arguments={"url": path, "format": "npy", "transform": None, "seed": 1, "shuffle": "exact", "decode": True},
        kinds={
            "url": "path",
            "format": "choice",
            "transform": "function or None",
            "seed": "seed",
            "shuffle": "choice",
            "decode": "flag",
        },
    )
    yield Case(
        title="Dataset.sample",
        call=data.sample,
        arguments={"number": 3, "epoch": 1, "draw": 1},
        kinds={"number": "seed", "epoch": "seed", "draw": "seed"},
    )
    yield Case(
        title="Dataset.weighted",
        call=data.weighted,
        arguments={"weights": [1.0] * COUNT, "length": 5},
        kinds={"weights": "data set", "length": "count or None"},
    )
    yield Case(
        title="Mixture",
        call=Mixture,
        arguments={"datasets": [data, data], "weights": [1, 2], "seed": 1, "length": 20},
        kinds={"datasets": "data set", "weights": "data set", "seed": "seed", "length": "count or None"},
    )
    yield Case(
        title="Shuffle",
        call=Shuffle,
        arguments={"kind": "exact", "window": 3, "read_amplification": 2.0},
        kinds={"kind": "choice", "window": "count"},
    )
    limits = ("record_bytes", "group_bytes", "pixels", "index_bytes", "samples")
    yield Case(title="Limits", call=Limits, arguments=dict.fromkeys(limits, 9), kinds=dict.fromkeys(limits, "count"))
    yield Case(
        title="BlockCache",
        call=BlockCache,
        arguments={"root": path.parent / "cache", "quota_bytes": 9, "foreign": False},
        kinds={"root": "path", "quota_bytes": "from zero", "foreign": "flag"},
    )
    yield Case(
        title="cached",
        call=cached,
        arguments={"dataset": [1.0, 2.0], "cache": path.parent / "cache", "key": "k", "quota_bytes": 1 << 20},
        kinds={"quota_bytes": "from zero"},
    )
    yield Case(
        title="open_storage",
        call=open_storage,
        arguments={"url": path, "timeout_s": 3.0, "readers": 2},
        kinds={"url": "path", "timeout_s": "number", "readers": "count"},
    )


def order_cases() -> Iterator[Case]:
    yield Case(
        title="shard_batch",
        call=shard_batch,
        arguments={"batch": [1, 2, 3], "rank": 0, "ranks": 2},
        kinds={"rank": "from zero", "ranks": "count"},
    )
    yield Case(
        title="merge_batches",
        call=merge_batches,
        arguments={"batches": [[1], [2]], "count": 2, "drops_last": True},
        kinds={"count": "count", "drops_last": "flag"},
    )
    yield Case(
        title="seed_for",
        call=seed_for,
        arguments={"seed": 3, "rank": 1},
        kinds={"seed": "seed", "rank": "from zero"},
    )
    order = ElasticOrder(range(8), True, 0, lambda: (0, 2))
    yield Case(
        title="ElasticOrder",
        call=ElasticOrder,
        arguments={"dataset": range(8), "shuffle": True, "seed": 0, "place": lambda: (0, 1)},
        kinds={"shuffle": "flag", "seed": "seed", "place": "function"},
    )
    yield Case(title="set_epoch", call=order.set_epoch, arguments={"epoch": 1}, kinds={"epoch": "from zero"})
    yield Case(
        title="record_batch",
        call=order.record_batch,
        arguments={"batch_idx": 0, "batch_size": 1},
        kinds={"batch_size": "from zero"},
    )
    for kind in (RandomCrop, CenterCrop, RandomResizedCrop):
        kinds = {"size": "count", "then": "function or None"}
        yield Case(title=kind.__name__, call=kind, arguments={"size": 8, "then": None}, kinds=kinds)
    yield Case(
        title="RandomCrop's mirror",
        call=RandomCrop,
        arguments={"size": 8, "mirrored": True},
        kinds={"mirrored": "flag"},
    )
    for schedule in (Cosine, Polynomial, Warmup):
        title = f"{schedule.__name__} steps"
        yield Case(title=title, call=schedule, arguments={"steps": 5.0}, kinds={"steps": "number"})
    yield Case(title="Constant", call=Constant, arguments={"factor": 5.0}, kinds={"factor": "number"})
    yield Case(title="Steps", call=Steps, arguments={"at": (3,), "factor": 0.5}, kinds={"factor": "number"})
    yield Case(
        title="ServerLimits",
        call=ServerLimits,
        arguments={"batch": 2, "delay_s": 1.0, "requests": 3, "time_s": 2.0},
        kinds={"batch": "count", "delay_s": "number", "requests": "count", "time_s": "number"},
    )
    yield Case(
        title="split",
        call=lambda seed, share: split(
            [SplitUnit(members=(str(number),)) for number in range(4)], {"train": share, "val": 0.5}, seed
        ),
        arguments={"seed": 1, "share": 0.5},
        kinds={"seed": "seed", "share": "number"},
    )
    yield Case(
        title="RunLengths",
        call=lambda width, run: RunLengths(width=width, height=2, runs=(run, 3)),
        arguments={"width": 2, "run": 1},
        kinds={"width": "count", "run": "from zero"},
    )


@pytest.mark.parametrize("case", list(order_cases()), ids=str)
def test_a_wrong_value_is_refused_at_once(case: Case) -> None:
    require_refused(case)


def test_wrong_values_of_data_sets_and_loaders(stored: Path) -> None:
    for case in data_cases(stored):
        require_refused(case)


def test_a_seed_of_numpy_gives_the_order_of_the_equal_number() -> None:
    """It was no JSON, so that no order could be made with it."""
    plain, numpy_s = (Loader(ArrayDataset(ARRAYS, seed=seed), 5) for seed in (7, np.int64(7)))
    numpy_s.load_state_dict(plain.state_dict())
    for one, other in zip(plain, numpy_s, strict=True):
        assert np.array_equal(one["x"], other["x"])


def test_weights_that_are_no_numbers(stored: Path) -> None:
    data = Dataset(stored)
    for weights in (["1"] * COUNT, [True] * COUNT, [1.0] * (COUNT - 1) + [True], [[1.0]] * COUNT, [math.nan] * COUNT):
        with pytest.raises(ArgumentError, match="weight"):
            data.weighted(weights)  # type: ignore[arg-type]
    assert data.weighted(np.ones(COUNT, np.float32), 7).order.length == 7  # type: ignore[arg-type]
    assert data.weighted([*[0] * (COUNT - 1), 1]).order.samples(0, [0]).tolist() == [COUNT - 1]


def test_a_batch_beyond_the_epoch_takes_no_memory_for_it() -> None:
    loader = Loader(ArrayDataset(ARRAYS), 1 << 40, workers=Workers(1))
    assert [len(batch["x"]) for batch in loader] == [COUNT]
    loader.close()


def test_a_crop_of_a_field_that_is_not_there_names_the_fields() -> None:
    crop = RandomCrop(4, field="picture")
    with pytest.raises(ArgumentError, match=r"field='picture': the record has the fields 'image', 'label'"):
        crop({"image": np.zeros((8, 8, 3), np.uint8), "label": 1}, np.random.default_rng(0))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: box(left="1"), "coordinate '1': want a number"),
        (lambda: box(width=True), "coordinate True: want a number"),
        (lambda: box(class_name=3), "class 3: want a name"),
        (lambda: box(track=b"a"), "track b'a': want the name of an object, or None"),
        (lambda: box(attributes=("ab",)), r"attributes \('ab',\): want pairs of texts"),
        (lambda: Polygon(class_name="cat", outlines=(((0, 0), (1, None), (2, 2)),)), "coordinate None"),  # type: ignore[arg-type]
        (lambda: Polygon(class_name="cat", outlines=((0, 0), (1, 0), (2, 2))), "outlines .* want outlines of points"),  # type: ignore[arg-type]
        (lambda: Mask(class_name="cat", pixels=np.eye(2)), "want RunLengths, as from run_lengths_of"),  # type: ignore[arg-type]
        (lambda: RunLengths(width=2, height=2, runs=None), "run lengths of None"),  # type: ignore[arg-type]
        (lambda: require_label("cat"), "'cat' is no label"),  # type: ignore[arg-type]
        (lambda: require_label(box(top=math.nan)), "coordinate nan: want a finite number"),
    ],
)
def test_labels_of_wrong_values(make: Callable[[], object], text: str) -> None:
    with pytest.raises(DataError, match=text):
        make()


def box(**other: Any) -> Box:
    return Box(**{"class_name": "cat", "left": 0, "top": 0, "width": 2, "height": 2, **other})


def test_labels_of_lists_and_of_numpy_s_numbers_are_kept() -> None:
    """They could be stated, but not be compared, or not be written."""
    polygon = Polygon(class_name="cat", outlines=[[[0, 0], [1, 0], [2, np.float32(0.5)]]])  # type: ignore[arg-type]
    for label in (polygon, box(left=np.int64(1)), box(attributes=[["difficult", "1"]])):
        assert from_json(json.loads(json.dumps(to_json(label)))) == label
        assert {label: 1}


def test_probabilities_are_no_mask() -> None:
    """Nearly all of them would count as in the mask."""
    with pytest.raises(ArgumentError, match=r"pixels of type float64: want booleans, as from `probabilities > 0\.5`"):
        run_lengths_of(np.full((2, 2), 0.1))
    for shape in ((4,), (0, 2), (2, 2, 1)):
        with pytest.raises(ArgumentError, match="pixels of shape"):
            run_lengths_of(np.zeros(shape, bool))
    for dtype in (np.uint8, np.float32):
        assert run_lengths_of(np.eye(3, dtype=dtype)) == run_lengths_of(np.eye(3) > 0)


def test_checks() -> None:
    assert [whole(each) for each in (3, np.int8(3), np.array(3), 3.0, "3", True, np.True_, None)] == [3] * 3 + [
        None
    ] * 5
    assert [is_number(each) for each in (3, 0.5, np.float16(1), True, "1", 1j, np.ones(1))] == [True] * 3 + [False] * 4
    assert type(require_whole("n", np.int64(3))) is int
    assert type(require_number("n", np.float32(3))) is float
    with pytest.raises(ArgumentError, match=r"^n=9: want a whole number, 1 to 8$"):
        require_whole("n", 9, 1, 8)
    with pytest.raises(ArgumentError, match=r"^n=0: want a number above 0 and at most 0\.5$"):
        require_number("n", 0, above=True, most=0.5)
    with pytest.raises(ArgumentError, match=r"^betas=\(0\.9,\): want 2 numbers$"):
        require_numbers("betas", (0.9,), 2)
    with pytest.raises(ArgumentError, match=r"^n=\[0, 1, 2.*\.\.\.: want"):
        require_whole("n", list(range(1000)))
    with pytest.raises(ArgumentError, match=r"^n=\(a int that is too long to show\): want"):
        require_whole("n", 10**5000, most=1)
    with pytest.raises(ArgumentError, match=r"^kind=\['a'\]: want 'a' or 'b'$"):
        require_choice("kind", ["a"], ("a", "b"))
