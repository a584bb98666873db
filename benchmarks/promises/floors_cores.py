"""Check the floors of one host with many cores, from 4 ranks to one rank per core.

    python benchmarks/promises/floors_cores.py [--only NAME,...] [--again | --keep] [--list]

See floors.py for the options. Each library runs all sizes in one job, because starting sixteen ranks takes longer than
timing them. In the same turns, `multiring` is timed on its own memory and `multiring-ordinary` on ordinary memory. A
line needs a machine with at least as many cores as the line has ranks.
"""

import statistics
import sys
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.promises.floors import MIB, PEERS, Line, Record, Verdict, main, ours, peers, ratios

SIZES = ("64", "1KiB", "16KiB", "64KiB", "256KiB", "1MiB", "8MiB", "64MiB")


def beside_the_best(records: list[Record]) -> Iterable[Verdict]:
    """Judge every size and kind of memory against the fastest peer.

    The figure includes the share of the memory's bound.
    """
    for library in ("multiring", "multiring-ordinary"):
        for size_bytes in dict.fromkeys(record["size_bytes"] for record in records):
            own = ours(records, size_bytes, library)
            others = [record for record in peers(records, size_bytes) if not record["library"].startswith("multiring")]
            best = min(others, key=lambda record: float(record["median_s"]))
            taken = ratios(best, own)
            middle = statistics.median(taken)
            floor, aim = (1.5, 3.0) if size_bytes >= MIB else (0.9, 1.0)
            share = own["algbw_bytes_per_s"] / own["bound_bytes_per_s"]
            figure = (
                f"{own['median_s'] * 1e6:.1f} us, {middle:.2f} x {best['library']} [{min(taken):.2f}, {max(taken):.2f}]"
            )
            what = f"{own['ranks']} ranks, {own['buffers']}, {size_bytes} B"
            yield Verdict(what, f"{figure}, {share:.0%} of the bound", f"{floor:g} x", f"{aim:g} x", middle >= floor)


def line_of(ranks: int) -> Line:
    """Return the line for a number of ranks."""
    options = f"--ranks {ranks} --against multiring-ordinary,{PEERS} --sizes {','.join(SIZES)} --pool-mib 0 --together"
    return Line(f"ranks-{ranks}", (f"all_reduce {options} --seconds 0.1",), beside_the_best)


LINES = tuple(line_of(ranks) for ranks in (4, 8, 16))

if __name__ == "__main__":
    sys.exit(main(LINES, __doc__))
