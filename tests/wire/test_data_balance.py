"""The balance line of short trainings, from the counters of the loader and the runtime."""

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.data_sets import npy_files, packed
from tests.support.ranks import Here, run_ranks

from multiring.data import Dataset, Loader, Workers
from multiring.data.balance.decision import Balance, TrainingCounts
from multiring.data.balance.watching import BalanceWatch
from multiring.data.packing.writing import PackOptions, pack
from multiring.data.readers.source import Record
from multiring.data.readers.storage import LocalStorage
from multiring.data.stages import COPY, DECODE, REQUESTED
from multiring.errors import DataError, StateError

PAUSE_S = 2.0  # long beside what all batches take
SLOW_S = 0.012  # long beside the turns that other processes take of a core
LATE_S = 0.05
TRIES = 6
_now = {"slow_s": SLOW_S}


class OneByOne(LocalStorage):
    """A disk that serves one read at a time, slowly."""

    turn = threading.Lock()

    def read_into(self, name: str, begin: int, out: memoryview) -> None:
        """Read slowly."""
        with self.turn:
            time.sleep(_now["slow_s"])
        super().read_into(name, begin, out)


def few(record: Record, generator: np.random.Generator) -> Record:
    """Keep only the fields whose shape is the same in every record."""
    del generator
    return {"array": record["array"], "label": record["label"]}


def slow(record: Record, generator: np.random.Generator) -> Record:
    """Transform a record slowly."""
    time.sleep(_now["slow_s"])
    return few(record, generator)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    return packed(tmp_path_factory.mktemp("data") / "pack")


def told(loader: Loader, epochs: int = 4, compute_s: float = 0.0) -> Balance:
    watch = BalanceWatch(loader)
    for _ in range(epochs):
        for _ in loader:
            time.sleep(compute_s)
    return watch.finish()


def on_free_cores(data: Dataset, workers: int = 2, computes: float = 0.0) -> Balance:
    """Return the balance of a training whose workers hardly waited for a core: else, the cores are what is slow.

    Where they did wait, all is slower in later tries, so that waits of the same length are a smaller part. A step
    computes as long as `computes` slow reads.
    """
    try:
        for number in range(TRIES):
            _now["slow_s"] = SLOW_S * 2 ** (number // 2)
            loader = Loader(data, 4, workers=workers)
            found = told(loader, compute_s=computes * _now["slow_s"])
            if loader.spent["queued"] < 0.02 * sum(loader.spent[each] for each in (*REQUESTED, DECODE, COPY)):
                break
    finally:
        _now["slow_s"] = SLOW_S
    return found


def test_short_trainings_are_bounded_by_what_is_slow(url: str) -> None:
    disk = on_free_cores(Dataset(OneByOne(url), transform=few))
    assert disk.bound == "disk", str(disk)
    compute = on_free_cores(Dataset(url, transform=few), computes=5)
    assert compute.bound == "compute", str(compute)
    assert compute.shares["compute"] > 0.7
    workers = on_free_cores(Dataset(url, transform=slow), workers=1)
    assert workers.bound == "workers", str(workers)
    assert workers.shares["decode"] > 0.7
    with_processes = Loader(Dataset(url, transform=slow), 4, workers=Workers(1, processes=True))
    for _ in with_processes:
        pass
    assert with_processes.spent["decode"] > 0.9 * with_processes.samples.order.length * SLOW_S, (
        "the workers' decoding time is missing"
    )
    with_processes.close()


def test_what_is_paused_does_not_count_and_a_watch_ends_once(url: str) -> None:
    loader = Loader(Dataset(url, transform=few), 4)
    watch = BalanceWatch(loader)
    with watch.paused():
        time.sleep(PAUSE_S)
        with pytest.raises(StateError, match="paused"):
            watch.finish()
    batches = sum(1 for _ in loader)
    assert watch.finish().step_s < PAUSE_S / batches
    with pytest.raises(StateError, match="finished"):
        watch.finish()
    with pytest.raises(StateError, match="has not yielded a batch"):
        BalanceWatch(loader).finish()


def summing(here: Here, url: str) -> tuple[TrainingCounts, TrainingCounts]:
    """Sum large arrays on both ranks at the same time, then small arrays with rank 1 late."""
    group = here.join()
    loader = Loader(Dataset(url, transform=few), 3)
    found = []
    for size, late_s in ((1 << 21, 0.0), (16, LATE_S)):
        watch = BalanceWatch(loader, here.size)
        for _ in loader:
            time.sleep(late_s * here.rank)
            group.all_reduce(np.ones(size, np.float32))
        watch.finish()
        found.append(watch.counted())
    return found[0], found[1]


def test_the_wire_and_late_ranks_are_told_apart(url: str) -> None:
    (wire, waited), (_, late) = run_ranks(summing, 2, url, engine="tcp")
    assert 0 < wire.exposed_s <= wire.wire_s <= wire.wall_s
    assert waited.peers_s > 4 * LATE_S / 2, "the wait for the late rank was counted as wire time"
    assert late.peers_s < waited.peers_s
    assert waited.exposed_s < wire.exposed_s


def test_a_batch_that_is_kept_stays_and_memory_of_others_is_used_again(url: str) -> None:
    loader = Loader(Dataset(url, transform=few, shuffle="none"), 3)
    kept = next(iter(loader))["array"][1:]
    before = kept.copy()
    places = set()
    for _ in range(5):
        for batch in loader:
            places.add(batch["array"].ctypes.data)
            assert not np.shares_memory(batch["array"], kept)
        del batch
    np.testing.assert_array_equal(kept, before)
    assert len(places) <= 8, "memory of dropped batches was not reused"


def test_rows_that_are_read_at_once_are_those_read_alone(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    npy_files(tmp_path / "files" / "a")
    files = Dataset(str(tmp_path / "files"), format="npy-files", shuffle="none")
    place = tmp_path / "pack"
    pack(files.source, len(files), place, PackOptions(shard_bytes=3000), lambda *_: None)
    data = Dataset(str(place), seed=2)
    fields = [each.name for each in data.source.manifest.fields]
    assert {"array", "name"} <= set(fields)
    loader = Loader(data, 5)
    layout = loader.layout()
    numbers = np.array([7, 0, 11])
    out = {name: np.empty((3, *shape), dtype) for name, (shape, dtype) in layout.arrays.items()}
    lists = data.fills_rows(numbers, out)
    assert lists is not None
    assert lists.keys() == set(layout.lists)
    batches: list[dict[str, Any]] = [{**out, **lists}, next(iter(loader))]
    for batch in batches:
        for row, name in enumerate(batch["name"]):
            alone = next(each for each in data if each["name"] == name)
            for field in fields:
                np.testing.assert_array_equal(batch[field][row], alone[field])
    shard = place / data.shards[-1].name
    shard.write_bytes(shard.read_bytes()[:600])
    with pytest.raises(DataError, match=r"ends at|cut short"):
        list(Loader(Dataset(str(place)), 5))
