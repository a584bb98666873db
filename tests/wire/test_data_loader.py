"""Loaders give the same samples and augmentation with any workers, resume anywhere, and survive a worker's death."""

import hashlib
import os
import pickle
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.support.data_sets import npy_files, packed

from multiring.data import Dataset, Loader, Mixture, Workers
from multiring.data.augment import CenterCrop
from multiring.data.feeding import processes as worker_processes
from multiring.data.feeding.processes import ProcessWorkers
from multiring.data.readers.source import Record
from multiring.errors import ArgumentError, DataError, StateError

COUNT = 12


def noisy(record: Record, generator: np.random.Generator) -> Record:
    """Add random noise, which shows the random numbers that were drawn."""
    return {"array": record["array"] + generator.normal(size=record["array"].shape), "label": record["label"]}


def fatal(flag: Path) -> None:
    try:
        flag.unlink()
    except FileNotFoundError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


class Deadly:
    """A transform whose process dies at sample 5 while a folder contains files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, record: Record, generator: np.random.Generator) -> Record:
        if record["label"] == 5:
            for each in self.folder.iterdir():
                fatal(each)
                break
        return noisy(record, generator)


def seen(loaders: list[Loader]) -> list[tuple[int, str]]:
    """Return the samples of the ranks' loaders in the epoch's order, each with its digest."""
    found: list[tuple[int, str]] = []
    for batches in zip(*loaders, strict=True):
        shares = [loader.share.samples for loader in loaders]
        rows = [
            [(int(label), digest(row)) for label, row in zip(batch["label"], batch["array"], strict=True)][:count]
            for batch, count in zip(batches, shares, strict=True)
        ]
        for turn in range(max(shares)):
            found += [each[turn] for each in rows if turn < len(each)]
    return found


def digest(row: Any) -> str:
    return hashlib.blake2b(np.ascontiguousarray(row).tobytes(), digest_size=8).hexdigest()


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    return packed(tmp_path_factory.mktemp("data") / "pack")


def plain(record: Record, generator: np.random.Generator) -> Record:
    """Drop the image."""
    del generator
    return {"array": record["array"], "label": record["label"]}


def test_samples_and_augmentation_are_the_same_for_any_ranks_and_workers(url: str) -> None:
    data = Dataset(url, transform=noisy, seed=3)
    whole = seen([Loader(data, 5, workers=1)])
    assert sorted(number for number, _ in whole) == list(range(COUNT))
    for ranks in (1, 2, 3, 4, 8):
        for workers in (1, 3):
            assert seen([Loader(data, 5, rank=rank, ranks=ranks, workers=workers) for rank in range(ranks)]) == whole
    with_processes = [Loader(data, 5, rank=rank, ranks=2, workers=Workers(2, processes=True)) for rank in range(2)]
    assert seen(with_processes) == whole
    second = seen(with_processes)
    assert sorted(number for number, _ in second) == list(range(COUNT))
    assert not {each for _, each in whole} & {each for _, each in second}, "two epochs had the same random numbers"
    for each in with_processes:
        each.close()


def test_a_training_goes_on_on_other_ranks_from_the_batches_it_used(url: str) -> None:
    data = Dataset(url, transform=noisy, seed=4)
    whole = seen([Loader(data, 1, workers=1)])
    first = [Loader(data, 4, rank=rank, ranks=2, workers=Workers(ahead=3)) for rank in range(2)]
    iterators = [iter(each) for each in first]
    found = []
    for _ in range(2):
        batches = [next(each) for each in iterators]
        found += [(int(b["label"][i]), digest(b["array"][i])) for i in range(2) for b in batches]
    states = [each.state_dict() for each in first]
    assert states[0] == states[1]
    assert states[0]["samples"] == 8, "prefetched samples were counted"
    rest = [Loader(data, 3, rank=rank, ranks=3, workers=1) for rank in range(3)]
    for each in rest:
        each.load_state_dict(states[0])
        assert len(each) == 2
    assert found + seen(rest) == whole
    assert rest[0].epoch == 1
    assert rest[0].state_dict()["samples"] == 0


def test_a_worker_that_is_killed_is_named_and_its_samples_come(
    url: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    whole = seen([Loader(Dataset(url, transform=noisy), 4)])
    (tmp_path / "once").touch()
    loader = Loader(Dataset(url, transform=Deadly(tmp_path)), 4, workers=Workers(2, processes=True))
    loader._layout = Loader(Dataset(url, transform=noisy), 4).layout()  # `Deadly` would kill this process
    assert seen([loader]) == whole
    loader.close()
    told = capfd.readouterr().err
    assert "was killed by SIGKILL; another worker replaces it and reads its" in told
    assert "data worker" in told
    for number in range(9):
        (tmp_path / str(number)).touch()
    again = Loader(Dataset(url, transform=Deadly(tmp_path)), 4, workers=Workers(2, processes=True))
    again._layout = loader._layout
    with pytest.raises(
        DataError, match=r"3 data workers died at samples \[.*5.*\]; the last worker was killed by SIGKILL"
    ):
        seen([again])
    again.close()


def test_batches_that_are_kept_keep_what_they_hold(url: str) -> None:
    loader = Loader(Dataset(url, transform=noisy), 1, workers=Workers(1, processes=True))
    first = list(loader)
    copies = [pickle.dumps(each) for each in first]
    list(loader)
    assert [pickle.dumps(each) for each in first] == copies
    loader.close()


def test_batches_come_into_the_memory_that_is_given(url: str) -> None:
    for processes in (False, True):
        given: list[Any] = []

        def allocate(shape: tuple[int, ...], dtype: Any, given: list[Any] = given) -> Any:
            given.append(np.full(shape, 7, dtype))
            return given[-1]

        loader = Loader(Dataset(url, transform=plain), 4, allocate=allocate, workers=Workers(1, processes=processes))
        for batch in loader:
            assert any(batch["array"] is each for each in given)
        loader.close()


def test_an_iteration_that_is_broken_off_leaves_nothing_behind(url: str) -> None:
    loader = Loader(Dataset(url, transform=noisy), 1, workers=Workers(2, processes=True))
    for _ in range(3):
        for number, _ in enumerate(loader):
            if number == 1:
                break
    crew = loader._workers
    assert isinstance(crew, ProcessWorkers)
    processes = [each.process for each in crew._workers]
    loader.close()
    assert all(each._closed for each in processes)


def test_records_of_lists_and_numbers_are_batched_by_field(tmp_path: Path) -> None:
    loader = Loader(Dataset(npy_files(tmp_path / "d"), format="npy-files", shuffle="none"), 5)
    first = next(iter(loader))
    assert first["array"].shape == (5, 3, 4)
    assert first["name"] == [f"{number:03}.npy" for number in range(5)]
    assert [len(each["name"]) for each in loader][-1] == 2, "the interrupted iteration did not continue"


def test_samples_that_cannot_be_read_are_named_or_left_out(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    url = npy_files(tmp_path / "d")
    (tmp_path / "d" / "007.npy").write_bytes(b"nothing")
    data = Dataset(url, format="npy-files")
    for processes in (False, True):
        loader = Loader(data, 4, workers=Workers(1, processes=processes))
        with pytest.raises(DataError, match=r"007\.npy is damaged.*skip_bad=True"):
            list(loader)
        loader.close()
        loader = Loader(data, 4, workers=Workers(1, processes=processes), skip_bad=True)
        assert sorted(name for batch in loader for name in batch["name"]) == sorted(
            f"{number:03}.npy" for number in range(COUNT) if number != 7
        )
        assert loader.skipped == 1
        loader.close()
        assert "left out:" in capfd.readouterr().err


def test_unlike_shapes_are_an_error_that_says_which(tmp_path: Path) -> None:
    url = npy_files(tmp_path / "d")
    np.save(tmp_path / "d" / "003.npy", np.zeros((2, 2), np.float32))
    with pytest.raises(
        DataError, match=r"sample 3: array is float32 \(2, 2\), but in the first sample it is float32 \(3, 4\)"
    ):
        list(Loader(Dataset(url, format="npy-files", shuffle="none"), 4))


@pytest.mark.parametrize("missing", range(4))
def test_a_missing_number_is_an_error_wherever_it_is(missing: int, tmp_path: Path) -> None:
    """Otherwise a batch would be a list or an array, as the order of the samples has it."""
    column = [None if number == missing else float(number) for number in range(4)]
    (tmp_path / "d").mkdir()
    pq.write_table(pa.table({"x": column, "name": ["a", None, "b", None]}), tmp_path / "d" / "a.parquet")
    data = Dataset(tmp_path / "d", shuffle="none")
    with pytest.raises(DataError, match=r"sample \d: x (is .*1.0.*, but the first sample|has no value).*fills missing"):
        list(Loader(data, 4))

    def fill(record: Record, _generator: np.random.Generator) -> Record:
        return record | {"x": np.nan if record["x"] is None else record["x"]}

    (batch,) = Loader(Dataset(tmp_path / "d", shuffle="none", transform=fill), 4)
    assert np.isnan(batch["x"]).tolist() == [number == missing for number in range(4)]
    assert batch["name"] == ["a", None, "b", None]


@pytest.mark.parametrize("made", [None, ["x"], "x"])
@pytest.mark.parametrize("crops", [False, True])
def test_a_transform_that_returns_no_record_is_named(url: str, made: Any, *, crops: bool) -> None:
    def wrong(_record: Record, _generator: np.random.Generator) -> Any:
        return made

    transform: Any = CenterCrop(4, then=wrong) if crops else wrong
    with pytest.raises(DataError, match=r"the transform returned (None|a list|a str): want the record, a dict"):
        list(Loader(Dataset(url, transform=transform), 4))


def test_a_state_that_is_none_is_refused(url: str) -> None:
    loader: Any = Loader(Dataset(url), 4)
    with pytest.raises(ArgumentError, match="it is a NoneType; want a state from state_dict"):
        loader.load_state_dict(None)


class Unloadable:
    """A transform that no other process can load, like one defined under `if __name__ == "__main__":`."""

    def __call__(self, record: Record, generator: np.random.Generator) -> Record:
        return plain(record, generator)

    def __reduce__(self) -> Any:
        return (_load, ())


def _load() -> Any:
    raise AttributeError("there is no such transform")


def test_workers_that_cannot_start_are_an_error_and_are_not_replaced(
    url: str, capfd: pytest.CaptureFixture[str]
) -> None:
    loader = Loader(Dataset(url, transform=Unloadable()), 4, workers=Workers(2, processes=True))
    with pytest.raises(DataError, match="a data worker cannot load the data set: AttributeError: there is no such"):
        list(loader)
    loader.close()
    assert "replaces" not in capfd.readouterr().err


def test_workers_that_die_without_a_task_are_not_replaced_for_ever(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a script without a guard around its main part, each of whose workers runs the script again and fails."""
    monkeypatch.setattr(worker_processes, "_work", leave)
    loader = Loader(Dataset(url, transform=plain), 4, workers=Workers(2, processes=True, context="fork"))
    with pytest.raises(DataError, match=r"3 data workers (ended with exit code 7|died at samples)"):
        list(loader)
    crew: Any = loader._workers
    crew._thread.join(240)
    assert not crew._thread.is_alive()
    loader.close()


def leave(*_arguments: Any) -> None:
    os._exit(7)


def test_processes_widen_a_batchs_type_too(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    values = [np.int8(1), np.int8(2), np.int64(2**40), np.float32(0.5), np.int8(3), np.uint16(60_000)]
    for number, value in enumerate(values):
        np.save(tmp_path / "d" / f"{number}.npy", np.full(3, value))
    data = Dataset(str(tmp_path / "d"), format="npy-files", shuffle="none")
    loader = Loader(data, 2, workers=Workers(2, processes=True))
    batches = [each["array"] for each in loader]
    assert [each[:, 0].tolist() for each in batches] == [[1, 2], [2**40, 0.5], [3, 60_000]]
    assert [each.dtype for each in batches] == [np.int8, np.float64, np.float64]
    loader.close()


def test_a_mixture_draws_from_all_and_is_resumed(url: str) -> None:
    data = [Dataset(url, transform=noisy, seed=seed) for seed in (1, 2)]
    mixture = Mixture(data, [3, 1], seed=5, length=40)
    whole = seen([Loader(mixture, 8)])
    assert len(whole) == 40
    halves = [Loader(mixture, 8, rank=rank, ranks=2) for rank in range(2)]
    assert seen(halves) == whole
    first = Loader(mixture, 8)
    batches = iter(first)
    next(batches)
    rest = Loader(mixture, 4)
    rest.load_state_dict(first.state_dict())
    assert seen([rest]) == whole[8:]


def test_what_makes_no_sense_is_refused(url: str) -> None:
    data = Dataset(url)
    for options in ({"batch": 0}, {"batch": 1, "workers": 0}, {"batch": 1, "rank": 2, "ranks": 2}):
        with pytest.raises(ArgumentError, match="want"):
            Loader(data, **options)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="ahead=0: want a whole number, 1 or more"):
        Workers(ahead=0)
    with pytest.raises(ArgumentError, match=r"context='thread'.*forkserver"):
        Workers(context="thread")
    with pytest.raises(ArgumentError, match="12 samples only"):
        Loader(data, 13, drop_last=True)
    with pytest.raises(StateError, match="has not yielded a batch"):
        Loader(data, 1).share.weight  # noqa: B018 -- it raises
    loader = Loader(Dataset(url, transform=plain), 5, drop_last=True)
    assert len(list(loader)) == 2
    assert loader.epoch == 1
