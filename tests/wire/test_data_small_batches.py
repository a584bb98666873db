"""Small batches that are made in groups are those that are made one by one, also after errors and interruptions."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.support import data_sets

from multiring.data import Dataset, Loader, Workers
from multiring.data.feeding import batches, threads
from multiring.data.packing.writing import PackOptions, pack
from multiring.errors import DataError

COUNT = 300
_BATCH = 7


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a pack of small arrays with names."""
    place = tmp_path_factory.mktemp("small")
    (place / "files").mkdir()
    for number in range(COUNT):
        np.save(place / "files" / f"{number:04}.npy", np.full((4, 4), number, np.float32))
    files = Dataset(str(place / "files"), format="npy-files", shuffle="none")
    pack(files.source, len(files), place / "pack", PackOptions(shard_bytes=1 << 13), lambda *_: None)
    return str(place / "pack")


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the number of batches of each group that is read at once."""
    found: list[int] = []
    inner = batches.fill_together

    def counted(samples: Any, layout: Any, rows: Any, wanted: Any) -> Any:
        made = inner(samples, layout, rows, wanted)
        if made is not None:
            found.append(len(made))
        return made

    monkeypatch.setattr(threads, "fill_together", counted)
    return found


def content(batch: dict[str, Any]) -> tuple[list[float], list[str]]:
    assert (batch["array"] == batch["array"][:, :1, :1]).all()
    return batch["array"][:, 0, 0].tolist(), batch["name"]


def one_by_one(data: Dataset, **options: Any) -> Loader:
    """Return a loader that makes each batch alone, because it is given the memory."""
    return Loader(data, _BATCH, allocate=np.empty, **options)


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("place", [(0, 1), (1, 2)])
def test_groups_change_no_batch(url: str, groups: list[int], workers: int, place: tuple[int, int]) -> None:
    data = Dataset(url, seed=5)
    rank, ranks = place
    alone, together = (
        one_by_one(data, rank=rank, ranks=ranks),
        Loader(data, _BATCH, rank=rank, ranks=ranks, workers=workers),
    )
    for _ in range(2):
        wanted = [(content(batch), alone.share, alone.state_dict()) for batch in alone]
        kept = [(batch, together.share, together.state_dict()) for batch in together]
        # All batches were kept, so no memory of theirs may have been used again.
        assert [(content(batch), share, state) for batch, share, state in kept] == wanted
    assert max(groups) > 1
    assert sum(groups) > COUNT // _BATCH


def test_the_next_epoch_uses_the_memory_again_and_batches_are_right(url: str, groups: list[int]) -> None:
    data = Dataset(url, seed=6)
    alone, together = one_by_one(data), Loader(data, _BATCH, workers=2)
    for _ in range(4):
        for wanted, found in zip(alone, together, strict=True):
            assert content(found) == content(wanted)
            found["array"][:] = -1.0  # the user's own from now on
    assert max(groups) > 1


@pytest.mark.parametrize("used", [1, 2, 9, 30])
def test_an_interrupted_training_goes_on_with_the_next_batch(url: str, groups: list[int], used: int) -> None:
    data = Dataset(url, seed=7)
    wanted = [content(batch) for batch in one_by_one(data)]
    first = Loader(data, _BATCH)
    running = iter(first)
    found = [content(next(running)) for _ in range(used)]
    state = first.state_dict()
    first.close()  # the running iteration gets new threads
    found.append(content(next(running)))
    assert found == wanted[: used + 1]
    del running
    other = Loader(data, _BATCH)
    other.load_state_dict(state)
    assert [content(batch) for batch in other] == wanted[used:]
    assert max(groups) > 1


@pytest.mark.parametrize("workers", [1, 2])
def test_a_damaged_sample_fails_its_own_batch_and_is_left_out_of_it(
    url: str, tmp_path: Path, groups: list[int], workers: int, capfd: pytest.CaptureFixture[str]
) -> None:
    names = sorted(each.name for each in Path(url).iterdir())
    for name in names:
        (tmp_path / name).write_bytes((Path(url) / name).read_bytes())
    damaged = max((each for each in tmp_path.iterdir() if "shard" in each.name), key=lambda each: each.name)
    damaged.write_bytes(damaged.read_bytes()[:-1000])

    def until_error(loader: Loader) -> tuple[list[Any], str]:
        found: list[Any] = []
        with pytest.raises(DataError) as raised:
            found.extend(content(batch) for batch in loader)
        loader.close()
        return found, str(raised.value)

    data = Dataset(str(tmp_path), seed=8)
    assert until_error(Loader(data, _BATCH, workers=workers)) == until_error(one_by_one(data))
    rest = [content(batch) for batch in Loader(data, _BATCH, workers=workers, skip_bad=True)]
    assert rest == [content(batch) for batch in one_by_one(data, skip_bad=True)]
    assert 0 < sum(len(names) for _, names in rest) < COUNT
    assert max(groups) > 1
    assert "left out" in capfd.readouterr().err


def test_large_records_transforms_and_processes_make_no_groups(
    url: str, groups: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = Dataset(url, seed=9)
    list(Loader(Dataset(url, transform=lambda record, _: record), _BATCH))
    processes = Loader(data, _BATCH, workers=Workers(1, processes=True))
    list(processes)
    processes.close()
    row = 64 + len("0000.npy")  # the array and the name
    monkeypatch.setattr(threads, "_TOGETHER_BYTES", 2 * _BATCH * row - 1)  # no room for two batches
    list(Loader(data, _BATCH))
    assert groups == []
    monkeypatch.setattr(threads, "_TOGETHER_BYTES", 2 * _BATCH * row)
    list(Loader(data, _BATCH))
    assert max(groups) > 1


def texts(place: Path) -> str:
    """Return a pack of numbers with texts of 140 KB."""
    place.mkdir()
    rows = {"label": list(range(60)), "text": [f"{number:05}" * 28_000 for number in range(60)]}
    pq.write_table(pa.table(rows), place / "a.parquet", row_group_size=20)
    files = Dataset(str(place), shuffle="none")
    pack(files.source, len(files), place / "pack", PackOptions(), lambda *_: None)
    return str(place / "pack")


@pytest.mark.parametrize("kind", ["images", "cached", "texts"])
def test_samples_that_are_read_one_by_one_or_have_long_texts_make_no_groups(
    kind: str, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One worker would make all batches of a group one after the other, and many long texts would be in memory."""
    begun: list[int] = []
    inner = batches.fill_together

    def counted(samples: Any, layout: Any, rows: Any, wanted: Any) -> Any:
        begun.append(len(wanted))
        return inner(samples, layout, rows, wanted)

    monkeypatch.setattr(threads, "fill_together", counted)
    data = {
        "images": lambda: data_sets.opened("pack", data_sets.packed(tmp_path / "images")),
        "cached": lambda: Dataset(url, cache=tmp_path / "cache"),
        "texts": lambda: Dataset(texts(tmp_path / "texts")),
    }[kind]()
    assert len(list(Loader(data, 2, workers=2))) == len(data) / 2
    assert begun == []
    assert len(list(Loader(Dataset(url), 2))) == COUNT / 2
    assert max(begun) > 1
