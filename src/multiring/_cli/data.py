"""multiring data: pack, verify, plan, time, stage and clean data sets.

`pack` makes tar shards and a manifest from any data set. `verify` finds damaged samples and shards. `plan` predicts the
cost of reading, also on paper for other machines. `bench` feeds a data set for some seconds, also on all ranks of a job
at once. `stage` copies a pack to the hosts' disks. Run as a job with one rank per host, it reads each byte from the
source once. `clean` removes files from the cache.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from multiring._cli.data_bench import add_bench_arguments, bench
from multiring._cli.data_paper import add_paper_arguments, on_paper, require_no_paper
from multiring._cli.number_option import SEED, whole
from multiring._cli.output import counted, show
from multiring._runtime import init, shutdown
from multiring.data.caching.blocks import BlockCache, clean
from multiring.data.caching.mapped import cache_folder
from multiring.data.caching.storage import CachedStorage
from multiring.data.dataset import Dataset, read_amplification
from multiring.data.orders import ExactOrder, Shuffle
from multiring.data.packing.verifying import damages
from multiring.data.packing.writing import PackOptions, pack
from multiring.data.peers.sharing import exchange_of, told_once
from multiring.data.readers.opening import READERS, tell
from multiring.data.readers.storage import open_storage
from multiring.errors import ArgumentError, DataError

_DAMAGED = _INCOMPLETE = 1
_TOLD = 20  # how many numbers of skipped samples are printed
_SHOWN_S = 0.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    packing = _action(actions, "pack", "make a pack of a data set")
    packing.add_argument("target", type=Path, help="the folder to make")
    packing.add_argument("--shard", type=size_of, default=64 << 20, metavar="SIZE", help="shard size (default 64MiB)")
    packing.add_argument("--to", choices=["float16"], help="store float arrays as float16, normalised by channel")
    packing.add_argument(
        "--channel-axis", type=whole(-64, 63), default=0, metavar="AXIS", help="axis of channels (default 0)"
    )
    packing.add_argument("--shuffle", type=SEED, metavar="SEED", help="store the samples in the exact order of SEED")
    packing.add_argument("--skip-bad", action="store_true", help="leave out samples that cannot be read, and list them")
    packing.add_argument("--no-decode", action="store_true", help="store images without decoding them first")
    _action(actions, "verify", "find damaged samples and shards")
    plan = _action(actions, "plan", "predict the cost of reading", optional=True)
    plan.add_argument("--cache", type=size_of, metavar="SIZE", help="bytes that each host keeps")
    add_paper_arguments(plan)
    add_bench_arguments(
        _action(actions, "bench", "feed a data set for some seconds, and report the rate and its bounds")
    )
    stage = _action(actions, "stage", "copy a pack to this host's cache, or as a job to the caches of all hosts")
    _cache_arguments(stage)
    stage.add_argument(
        "--spread", action="store_true", help="keep only a part on each host; together the caches hold the pack"
    )
    cleaning = actions.add_parser("clean", help="remove unused files from the cache", allow_abbrev=False)
    _cache_arguments(cleaning)
    cleaning.add_argument("--keep", type=size_of, metavar="SIZE", help="remove the oldest files until SIZE is left")
    cleaning.add_argument("--all", action="store_true", help="remove everything")


def _action(actions: Any, name: str, text: str, *, optional: bool = False) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(name, help=text, description=text, allow_abbrev=False)
    parser.add_argument("url", nargs="?" if optional else None, help="a path, or a URL that fsspec reads")
    parser.add_argument("--format", choices=list(READERS), help="needed if the files' names do not show the format")
    return parser


def _cache_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--folder", type=Path, metavar="DIR", help="cache folder (default: MULTIRING_DATA_CACHE)")
    parser.add_argument("--quota", type=size_of, default=64 << 30, metavar="SIZE", help="cache size (default 64GiB)")


_UNITS = {
    "B": 1,
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("kMGT", 1)},
    **{f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGT", 1)},
}


def size_of(text: str) -> int:
    """Return the number of bytes for a text like 64MiB or 56.6MB."""
    digits = text.rstrip("BkKMGTi")
    try:
        size = int(float(digits) * _UNITS[text[len(digits) :] or "B"])
    except (KeyError, ValueError, OverflowError):
        size = -1
    if not 0 <= size < 1 << 63:
        raise argparse.ArgumentTypeError(f"{text!r}: want a size like 64MiB or 56.6MB")
    return size


def run(arguments: argparse.Namespace) -> int:
    """Run the action.

    Return 1 if `verify` found damage or `stage` could not keep all blocks, else 0.
    """
    acts = {"pack": _pack, "verify": _verify, "plan": _plan, "bench": bench, "stage": _stage, "clean": _clean}
    return acts[arguments.action](arguments)


class _Bar:
    """A progress bar with the rate and the remaining time, on standard error if that is a terminal."""

    def __init__(self, unit: str) -> None:
        self._unit = unit
        self._began = time.monotonic()
        self._shown = 0.0
        self._is_seen = sys.stderr.isatty()

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if not self._is_seen or (now - self._shown < _SHOWN_S and done < total):
            return
        self._shown = now
        rate = done / max(now - self._began, 1e-9)
        left = (total - done) / rate if rate else 0.0
        filled = int(30 * done / max(total, 1))
        scale, unit = (1e6, "MB") if self._unit == "B" else (1, self._unit)
        bar = f"[{'#' * filled}{'.' * (30 - filled)}] {done / max(total, 1):4.0%}"
        end = "\n" if done >= total else ""
        print(f"\r{bar}  {rate / scale:.4g} {unit}/s, {left:.0f} s left ", end=end, file=sys.stderr, flush=True)


def _opened(arguments: argparse.Namespace, *, decode: bool = True) -> Dataset:
    return Dataset(arguments.url, format=arguments.format, shuffle="none", decode=decode)


def _pack(arguments: argparse.Namespace) -> int:
    data = _opened(arguments, decode=False)
    bar = _Bar("samples")
    skipped: list[int] = []

    def skip(number: int, error: DataError) -> None:
        skipped.append(number)
        tell(f"left out: {error}")

    seed = arguments.shuffle
    order = None if seed is None else ExactOrder(len(data), seed).samples(0, range(len(data))).tolist()
    options = PackOptions(
        shard_bytes=arguments.shard,
        to_float16=arguments.to == "float16",
        channel_axis=arguments.channel_axis,
        order=order,
        on_bad=skip if arguments.skip_bad else None,
        check=None if arguments.no_decode else data.require_decodable,
    )
    made = pack(data.source, len(data), arguments.target, options, lambda done, _: bar(done, len(data)))
    show(f"{_extent(made.samples, len(made.shards))}, {made.size_bytes} bytes: {made.digest}")
    if skipped:
        shown = ", ".join(map(str, skipped[:_TOLD])) + (", ..." if len(skipped) > _TOLD else "")
        show(f"left out: {len(skipped)} of {counted(len(data), 'sample')}: {shown}")
    for field in made.fields:
        if field.statistics:
            worst, rms = max(field.statistics["worst_loss"]), max(field.statistics["rms_loss"])
            channels = len(field.statistics["mean"])
            words = f"{counted(channels, 'channel')} as float16"
            show(f"{field.name}: {words}, at most {worst:.2g} std lost, {rms:.2g} in root mean square")
    return 0


def _extent(samples: int, shards: int) -> str:
    return f"{counted(samples, 'sample')} in {counted(shards, 'shard')}"


def _verify(arguments: argparse.Namespace) -> int:
    data = _opened(arguments)
    is_pack = data.source.format == "pack"
    bar = _Bar("B" if is_pack else "samples")
    count = 0
    for each in damages(data, bar):
        show(f"{each.where}: {each.text}")
        count += 1
    sort = ("check sums" if count else "check sums, and every sample read") if is_pack else "every sample read"
    state = f"{count} damaged" if count else "whole"
    show(f"{_extent(len(data), len(data.shards))}: {state} ({sort})")
    if is_pack and (left_out := data.source.manifest.note.partition("; ")[2]):
        show(f"when it was made: {left_out}")
    return _DAMAGED if count else 0


def _plan(arguments: argparse.Namespace) -> int:
    if arguments.url is None:
        for line in on_paper(arguments):
            show(line)
        return 0
    require_no_paper(arguments)
    data = _opened(arguments)
    size = sum(each.size_bytes for each in data.shards)
    usual, exact = Shuffle(), read_amplification(data.source)
    largest = max(each.size_bytes for each in data.shards)
    words = f"{counted(len(data), 'sample')}, {size} bytes in {counted(len(data.shards), 'shard')}"
    show(f"{data.source.format} {data.digest}: {words}")
    show(
        f"exact order: reads {exact:.3g} times the data an epoch"
        f"{'' if exact <= usual.read_amplification else ', which has to be asked for'}"
    )
    show(
        f"windowed order of {usual.window} shards: reads it once, with at most "
        f"{min(usual.window, len(data.shards)) * largest} bytes in use"
    )
    if arguments.cache is not None:
        share = min(1.0, arguments.cache / size)
        show(f"with {arguments.cache} bytes kept: {(1 - share) * size:.0f} bytes from the source in later epochs")
    return 0


def _cache(arguments: argparse.Namespace) -> BlockCache:
    return BlockCache(arguments.folder or cache_folder(), arguments.quota, tell)


def _stage(arguments: argparse.Namespace) -> int:
    if arguments.format not in {None, "pack"}:
        raise ArgumentError(
            f"--format {arguments.format}: only packs can be staged; make a pack with multiring data pack"
        )
    source, cache = open_storage(arguments.url), _cache(arguments)
    group = init()
    try:
        storage = CachedStorage(told_once(group, source), cache)
        part = min(arguments.quota, storage.manifest.size_bytes)
        if part < storage.manifest.size_bytes and not arguments.spread:
            tell(f"the pack has {storage.manifest.size_bytes} bytes, the cache {arguments.quota}: only a part is kept")
        began = time.monotonic()
        with exchange_of(group, storage, tell) as exchange:
            if exchange is not None:
                exchange.stage(_Bar("B"), own_only=arguments.spread)
        passed = time.monotonic() - began
        lacking = 0
        if exchange is not None:
            wanted = [each for each in storage.each_block() if not arguments.spread or exchange.owns(*each)]
            lacking = sum(not cache.holds(storage.key, storage.number(*each)) for each in wanted)
            traffic, counts = exchange.traffic, storage.cache.counts
            show(
                f"rank {group.rank}: {storage.manifest.size_bytes} bytes in {passed:.3f} s: {traffic.source} from the "
                f"source, {traffic.peers} from peers, {counts.hits} blocks were here already"
            )
            if lacking:
                show(
                    f"rank {group.rank}: {lacking} of {len(wanted)} blocks are NOT kept in {cache.root}: want more "
                    "room on its disk, a larger --quota, or --spread over more hosts"
                )
        # Every rank returns the same exit code, so a shell's `&&` stops on all of them alike.
        lacks = np.array([lacking], np.int64)
        group.all_reduce(lacks)
    finally:
        shutdown()
    return _INCOMPLETE if lacks[0] else 0


def _clean(arguments: argparse.Namespace) -> int:
    done = clean(arguments.folder or cache_folder(), keep_bytes=arguments.keep, everything=arguments.all)
    kept = "file is" if done.foreign == 1 else "files are"
    others = f"; {done.foreign} {kept} not of the cache, and not removed" if done.foreign else ""
    show(
        f"removed {counted(done.removed, 'file')}, {done.removed_bytes} bytes; {done.left_bytes} bytes are left{others}"
    )
    return 0
