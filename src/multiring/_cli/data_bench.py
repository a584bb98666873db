"""multiring data bench: feed a data set for some seconds, also on several ranks at once, and measure one worker."""

import argparse
from pathlib import Path

from multiring._cli.number_option import COUNT, RANKS, SECONDS
from multiring._cli.output import counted, show
from multiring._limits.rank_cores import cores_of_rank
from multiring._replacing import replace_file, require_replaceable, words_of
from multiring._runtime import init, local_size, shutdown
from multiring._simulator.measured_feeding import MeasuredFeeding, is_file_of_feeding
from multiring._topology import Topology
from multiring.data.dataset import Dataset
from multiring.data.feeding.loader import Loader
from multiring.data.feeding.rates import Rates, measured
from multiring.data.orders import Shuffle
from multiring.errors import ArgumentError
from multiring.planner.parallelism import input_time

_WHAT = "a file of multiring data bench"


def add_bench_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the action's arguments."""
    parser.add_argument("--batch", type=COUNT, default=64, metavar="N", help="samples of a rank's batch (default 64)")
    parser.add_argument("--workers", type=RANKS, default=2, metavar="N", help="threads of a rank (default 2)")
    parser.add_argument(
        "--seconds", type=SECONDS, default=5.0, metavar="S", help="duration of each of three measurements (default 5)"
    )
    parser.add_argument(
        "--save", type=Path, metavar="FILE", help="write what one worker takes, for multiring simulate --input"
    )


def bench(arguments: argparse.Namespace) -> int:
    """Print the rates, and return 0. In a job, all ranks measure at once, and each prints its own rates."""
    if arguments.save is not None:
        _require_place(arguments.save)
    data = Dataset(arguments.url, format=arguments.format, shuffle=Shuffle(read_amplification=float("inf")))
    group = init()
    try:
        if len(data) < group.size:
            raise ArgumentError(
                f"{arguments.url}: {counted(len(data), 'sample')} for {counted(group.size, 'rank')}; want one for each"
            )
        batch = arguments.batch * group.size
        loader, alone = (
            Loader(data, batch, rank=group.rank, ranks=group.size, workers=workers)
            for workers in (arguments.workers, 1)
        )
        try:
            found = measured(data, loader, alone, arguments.seconds, group.barrier)
        finally:
            loader.close()
        feeding = _feeding(found, data, arguments.workers)
        _show(found, feeding, arguments.batch, f"rank {group.rank}: " if group.size > 1 else "")
        if arguments.save is not None and not group.rank:
            _save(feeding, arguments.save)
    finally:
        shutdown()
    return 0


def _feeding(found: Rates, data: Dataset, workers: int) -> MeasuredFeeding:
    size_bytes = sum(each.size_bytes for each in data.shards) / len(data)
    return MeasuredFeeding(
        workers=workers,
        worker_s=found.worker_s,
        cpu_s=found.cpu_s,
        batch_s=found.batch_s,
        sample_bytes=size_bytes,
    )


def _show(found: Rates, feeding: MeasuredFeeding, batch: int, whose: str) -> None:
    cores = cores_of_rank(local_size())
    expected = input_time(feeding.feeding(cores=cores), batch, 0.0, Topology(((0,),)))
    show(f"{whose}fed       {found.samples_per_s:12.1f} samples/s  {found.bytes_per_s / 1e6:10.1f} MB/s in batches")
    show(
        f"{whose}predicted {batch / expected.seconds:12.1f} samples/s  from one worker, by {feeding.workers} on "
        f"{cores:g} cores"
    )
    show(
        f"{whose}a worker  {1 / feeding.worker_s:12.1f} samples/s  of which reading one by one allows "
        f"{found.read_per_s:.1f}; a sample takes {1e6 * feeding.cpu_s:.4g} us of a core"
    )


def _require_place(path: Path) -> None:
    try:
        require_replaceable(path, is_ours=is_file_of_feeding, what=_WHAT)
    except OSError as error:
        raise ArgumentError(f"--save {words_of(error, path)}; want a file that can be written") from None
    if not path.absolute().parent.is_dir():
        raise ArgumentError(f"--save {path}: there is no directory {path.parent}; make it first")


def _save(feeding: MeasuredFeeding, path: Path) -> None:
    try:
        replace_file(path, feeding.as_text().encode(), is_ours=is_file_of_feeding, what=_WHAT)
    except OSError as error:
        raise ArgumentError(f"--save {words_of(error, path)}; what was measured is lost") from None
