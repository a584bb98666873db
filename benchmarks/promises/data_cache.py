"""Measure the source bytes that a cache saves, compared with LRU and the optimum.

    .venv/bin/python benchmarks/promises/data_cache.py [--megabytes 512] [--trials 10]

The cache keeps the blocks that are needed soonest. The optimum is computed separately, step by step over all sets of
units that fit. Loaders read packs through real caches, and every byte read from a shard counts. LRU is computed for the
same uses, with whole units. The exit code is 1 if a floor is missed.
"""

import argparse
import shlex
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parents[2]))  # lets this script import from the repository root

from benchmarks.evidence.support.claims import commit, machine

from multiring.data import Dataset, Loader, Shuffle
from multiring.data.caching.blocks import BlockCache, stored_bytes
from multiring.data.caching.expecting import Expected
from multiring.data.caching.storage import CachedStorage
from multiring.data.eviction import Deal, LeastRecent, NextUse, Policy, Uses
from multiring.data.eviction_search import LOOK
from multiring.data.orders import ExactOrder, WeightedOrder
from multiring.data.packing.writing import PackOptions, pack
from multiring.data.peers.block_client import BlockClient
from multiring.data.peers.block_server import BlockServer
from multiring.data.peers.exchange import Exchange
from multiring.data.peers.owners import Owners
from multiring.data.readers.storage import LocalStorage

UNITS, LEAST_SHARE, SLACK, LEAST_HOSTS = 10, 0.95, 0.02, 0.01
SECRET = b"data cache"
BATCH = 16

Numbers = NDArray[np.int64]


class Counted(LocalStorage):
    """A source that counts the bytes read from shards."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.read_bytes = 0
        self._count = threading.Lock()

    def read_into(self, name: str, begin: int, out: memoryview) -> None:
        """Read bytes of a file and count them."""
        super().read_into(name, begin, out)
        if name.endswith(".tar"):
            with self._count:
                self.read_bytes += len(out)


# ---- policies alone ----


def least_bytes(sequence: Numbers, sizes: Numbers, capacity: int) -> int:
    """Return the fewest bytes that any caching decision fetches, by exhaustive search."""
    count = len(sizes)
    sets = np.arange(1 << count)
    fits = np.array([sum(int(sizes[i]) for i in range(count) if each >> i & 1) for each in sets]) <= capacity
    cost = np.where(sets == 0, 0.0, np.inf)
    for unit in sequence.tolist():
        cost = cost + np.where(sets >> unit & 1, 0, sizes[unit])
        reached = np.full(len(sets), np.inf)
        np.minimum.at(reached, sets | 1 << unit, cost)
        for other in range(count):  # evicting a unit costs nothing
            without = sets[(sets >> other & 1) == 0]
            reached[without] = np.minimum(reached[without], reached[without | 1 << other])
        cost = np.where(fits, reached, np.inf)
    return int(cost.min())


def fetched_bytes(policy: Policy, sequence: Numbers, sizes: Numbers, *, looks: bool = True) -> int:
    """Return the bytes that a policy fetches."""

    def units_at(begin: int, end: int) -> tuple[Numbers, Numbers]:
        units = sequence[begin:end]
        return units, np.arange(begin, begin + len(units))

    uses = Uses(units_at, len(sizes), horizon=4 * len(sequence))
    fetched = 0
    for step, unit in enumerate(sequence.tolist()):
        uses.advance(step + 1)
        if policy.held[unit]:
            policy.touch(unit)
            continue
        fetched += int(sizes[unit])
        policy.admit(unit, uses.ahead(), None, uses.upcoming(LOOK).tolist() if looks else ())
    return fetched


def sequences(kind: str, seed: int, length: int) -> Numbers:
    """Return a random sequence of uses of a few units.

    The uses are weighted draws, or the alternating uses of two jobs that read all units in their own orders.
    """
    if kind == "weighted":
        weights = np.random.default_rng(seed).random(UNITS) ** 2
        return WeightedOrder(weights, length, seed).samples(0, np.arange(length))
    jobs = [ExactOrder(UNITS, 2 * seed + job) for job in range(2)]
    epochs = range(length // UNITS // 2)
    found = [np.concatenate([job.samples(epoch, np.arange(UNITS)) for epoch in epochs]) for job in jobs]
    return np.stack(found, 1).reshape(-1)


def of_optimum(kind: str, share: float, trials: int, length: int = 200) -> Iterator[tuple[float, float, float]]:
    """Yield the savings of three policies relative to the optimum.

    The policies are lookahead, next use alone, and LRU.
    """
    for seed in range(trials):
        sizes = np.random.default_rng(1000 + seed).integers(20, 100, UNITS)
        sequence = sequences(kind, seed, length)
        capacity = int(share * sizes.sum())
        total = int(sizes[sequence].sum())
        most = total - least_bytes(sequence, sizes, capacity)
        yield (
            (total - fetched_bytes(NextUse(sizes, capacity), sequence, sizes)) / most,
            (total - fetched_bytes(NextUse(sizes, capacity), sequence, sizes, looks=False)) / most,
            (total - fetched_bytes(LeastRecent(sizes, capacity), sequence, sizes)) / most,
        )


# ---- packs, caches and loaders ----


def packed(folder: Path, megabytes: int, sample_bytes: int, shard_bytes: int = 16 << 20) -> str:
    """Create a pack of arrays; return its path."""
    (folder / "d").mkdir(parents=True)
    count = megabytes * 10**6 // sample_bytes
    for number in range(count):
        array = np.random.default_rng(number).integers(0, 255, sample_bytes, dtype=np.uint8)
        np.save(folder / "d" / f"{number:06}.npy", array)
    source = Dataset(str(folder / "d"), format="npy-files").source
    pack(source, count, folder / "pack", PackOptions(shard_bytes=shard_bytes), lambda *_: None)
    return str(folder / "pack")


def part(storage: CachedStorage, share: float) -> int:
    """Return a quota that holds a share of a pack's blocks."""
    sizes = [storage.end_of(*place) - storage.begin_of(place[1]) for place in storage.each_block()]
    return int(share * sum(int(stored_bytes(each)) for each in sizes)) + 1


def limited(storage: CachedStorage, folder: Path, share: float) -> CachedStorage:
    """Return the pack with a cache for a share of the pack, and no memory cache."""
    return CachedStorage(storage.source, BlockCache(folder, part(storage, share)), memory_bytes=0)


def sent(source: Counted, loaders: list[Loader], epochs: int, data_bytes: int) -> list[float]:
    """Read epochs with alternating loaders, then close the loaders.

    Returns:
        For each epoch, the source's bytes divided by the data's bytes.
    """
    found = []
    for _ in range(epochs):
        before = source.read_bytes
        for _ in zip(*loaders, strict=True):
            pass
        found.append((source.read_bytes - before) / data_bytes)
    for each in loaders:
        each.close()
    return found


def alone(url: str, folder: Path, shuffle: str, epochs: int, jobs: int = 1) -> list[float]:
    """Return each epoch's source bytes per data byte.

    A quarter of the data is cached.
    """
    source = Counted(url)
    whole = CachedStorage(source, BlockCache(folder / "none"))
    storages = [limited(whole, folder / "cache", 0.25) for _ in range(jobs)]
    loaders = [
        Loader(Dataset(storage, shuffle=Shuffle(shuffle, window=4), seed=job), BATCH)
        for job, storage in enumerate(storages)
    ]
    return sent(source, loaders, epochs, whole.manifest.size_bytes)


def least_recent(url: str, shuffle: str, epochs: int) -> list[float]:
    """Return each epoch's bytes per data byte under LRU.

    A quarter of the data is cached. LRU fetches whole blocks.
    """
    with tempfile.TemporaryDirectory() as folder:
        storage = CachedStorage(LocalStorage(url), BlockCache(folder))
        data = Dataset(storage, shuffle=Shuffle(shuffle, window=4))
        sizes = np.array([storage.end_of(*place) - storage.begin_of(place[1]) for place in storage.each_block()])
        expected = Expected(data.order, Deal(len(data), BATCH, [0], 1), data.source.spans, storage.firsts)
        policy = LeastRecent(sizes, int(0.25 * sizes.sum()))
    found = []
    for epoch in range(epochs):
        units, _ = expected.needs(epoch * len(data), (epoch + 1) * len(data))
        fetched = 0
        for unit in units.tolist():
            policy.touch(unit)
            if not policy.held[unit]:
                fetched += int(sizes[unit])
                policy.admit(unit, np.empty(0))
        found.append(fetched / int(sizes.sum()))
    return found


def together(url: str, folder: Path, shuffle: str, epochs: int, hosts: int = 4) -> list[float]:
    """Return each epoch's source bytes per data byte, for hosts that share caches.

    Each host caches its part of the data.
    """
    source = Counted(url)
    whole = CachedStorage(source, BlockCache(folder / "none"))
    storages = [limited(whole, folder / f"host{number}", 1 / hosts) for number in range(hosts)]
    exchanges: list[Exchange] = []
    with ExitStack() as opened:

        def giver(number: int) -> Callable[[Any], bytes]:
            return lambda request: exchanges[number].give(request)  # noqa: PLW0108 -- the exchange does not exist yet

        servers = [BlockServer(SECRET, "127.0.0.1", giver(number), print) for number in range(hosts)]
        for here, storage in enumerate(storages):
            opened.callback(servers[here].close)
            peers = [None if n == here else BlockClient(each.address, SECRET, print) for n, each in enumerate(servers)]
            exchange = Exchange(storage, Owners([1.0] * hosts), here, peers, print)
            exchanges.append(exchange)
            storage.fetch_by(exchange.fetch, exchange.fetch_piece)
            storage.keep_only(np.array([exchange.owns(*each) for each in storage.each_block()]))
        loaders = [
            Loader(Dataset(storage, shuffle=Shuffle(shuffle, window=4)), BATCH, rank=rank, ranks=hosts)
            for rank, storage in enumerate(storages)
        ]
        return sent(source, loaders, epochs, whole.manifest.size_bytes)


def main() -> int:
    """Print all comparisons; return 1 if a floor is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=512, help="size of the data sets (512)")
    parser.add_argument("--trials", type=int, default=10, help="trials of each comparison with the optimum (10)")
    parser.add_argument("--epochs", type=int, default=4, help="epochs to read (4)")
    arguments = parser.parse_args()
    print(f"# What a cache saves, {time.strftime('%Y-%m-%d %H:%M')}\n")
    print(f"`{shlex.join(['python', *sys.argv])}` at commit {commit()}, {machine()}\n")
    print(f"## Of the exhaustive optimum's saving: {UNITS} units of 20 to 99, 200 uses, mean (least)\n")
    print("| uses | cached | looking ahead | next use alone | LRU |\n|---|---|---|---|---|", flush=True)
    missed = False
    for kind in ("weighted", "two jobs"):
        for share in (0.25, 0.5):
            rows = np.array(list(of_optimum(kind, share, arguments.trials)))
            shown = [f"{each.mean():.1%} ({each.min():.1%})" for each in rows.T]
            print(f"| {kind} | {share:.0%} | {' | '.join(shown)} |", flush=True)
            missed |= bool(rows[:, 0].mean() < LEAST_SHARE)
    print("\n## Source bytes / data, by epoch, a quarter cached on each host, nothing in memory\n")
    print("| samples | order | hosts | jobs | epochs | at most |\n|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as name:
        for sample_bytes in (1 << 17, 3 << 19):
            url = packed(Path(name) / str(sample_bytes), arguments.megabytes, sample_bytes)
            for shuffle in ("exact", "windowed"):
                folder = Path(name) / f"{sample_bytes}-{shuffle}"
                epochs = " ".join(f"{each:.4f}" for each in least_recent(url, shuffle, arguments.epochs))
                print(f"| {sample_bytes} | {shuffle} | 1 | 1, LRU | {epochs} | |", flush=True)
                for hosts, jobs, most in ((1, 1, 0.75 + SLACK), (1, 2, 2 * (0.75 + SLACK)), (4, 1, LEAST_HOSTS)):
                    where = folder / f"{hosts}-{jobs}"
                    where.mkdir(parents=True)
                    found = (
                        alone(url, where, shuffle, arguments.epochs, jobs)
                        if hosts == 1
                        else together(url, where, shuffle, arguments.epochs, hosts)
                    )
                    epochs = " ".join(f"{each:.4f}" for each in found)
                    print(f"| {sample_bytes} | {shuffle} | {hosts} | {jobs} | {epochs} | {most:.2f} |", flush=True)
                    missed |= max(found[1:]) > most
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
