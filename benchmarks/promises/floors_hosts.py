"""Check the floors between hosts, in labs on this machine (as root).

    sudo .venv/bin/python benchmarks/promises/floors_hosts.py [--only NAME,...] [--again | --keep] [--list]

See floors.py for the options and records. Shares are relative to a bound that each command measures first, with plain
sockets between the same hosts. Its formula is printed. A job's timed calls take 5 seconds, after one second that
empties the links' token buckets. A line takes two to four minutes. Open MPI busy-waits, here with eight ranks on two
cores; so its line, `openmpi`, is optional and has no floor. In the lines `unshaped-*`, each rank has a core, and Open
MPI is one of the peers.
"""

import statistics
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # lets this script import from the repository root

from benchmarks.promises.floors import MIB, Line, Record, Verdict, against_best, main, ours, ratios

Judge = Callable[[list[Record]], Iterable[Verdict]]
KIB = 2**10


def size_name(size_bytes: int) -> str:
    """Return a size as an argument of a command."""
    return f"{size_bytes // MIB}MiB" if size_bytes >= MIB else f"{size_bytes // KIB}KiB"


def share(size_bytes: int, floor: float, aim: float) -> Judge:
    """Return a judge of multiring's share of the bound."""

    def judge(records: list[Record]) -> Iterable[Verdict]:
        own = ours(records, size_bytes)
        bound = own["bound_bytes_per_s"]
        shares = [size_bytes / seconds / bound for seconds in own["seconds"]]
        middle = statistics.median(shares)
        algbw = own["algbw_bytes_per_s"] / 1e6
        figure = f"{middle:.1%} [{min(shares):.1%}, {max(shares):.1%}], {algbw:.1f} MB/s; {own['bound_formula']}"
        yield Verdict(
            f"{size_name(size_bytes)}, share of the bound", figure, f"{floor:.0%}", f"{aim:.0%}", middle >= floor
        )

    return judge


def times(size_bytes: int, slower: str, faster: str, floor: float, aim: float) -> Judge:
    """Return a judge of how many times faster one library is than another.

    A floor of 1 means strictly faster.
    """

    def judge(records: list[Record]) -> Iterable[Verdict]:
        taken = ratios(ours(records, size_bytes, slower), ours(records, size_bytes, faster))
        middle = statistics.median(taken)
        holds = middle > 1 if floor == 1 else middle >= floor
        figure = f"{middle:.2f} x [{min(taken):.2f}, {max(taken):.2f}]"
        what = f"{size_name(size_bytes)}, {faster} against {slower}"
        yield Verdict(what, figure, "> 1 x" if floor == 1 else f"{floor:g} x", f"{aim:g} x", holds)

    return judge


def told(size_bytes: int, library: str) -> Judge:
    """Return a judge that reports a library's figure without a floor."""

    def judge(records: list[Record]) -> Iterable[Verdict]:
        one = ours(records, size_bytes, library)
        figure = f"{one['algbw_bytes_per_s'] / 1e6:.1f} MB/s, {one['version']}, {one['settings']}"
        yield Verdict(f"{size_name(size_bytes)}, {library}", figure, "none", "", holds=True)

    return judge


def both(*judges: Judge) -> Judge:
    """Return a judge that applies all of these judges."""
    return lambda records: [verdict for judge in judges for verdict in judge(records)]


def command(lab: str, size_bytes: int, against: str, more: str = "") -> str:
    """Return the command that times an all_reduce of a size in a lab.

    Six alternations are the fewest with a 95 % interval.
    """
    return f"all_reduce {lab} --sizes {size_name(size_bytes)} --against {against} {more or '--alternations 6'}"


FOUR = "--hosts 4 --slots 2 --link 1gbit"
TWO = "--hosts 2 --slots 4 --link 1gbit"
RACKS = "--hosts 8 --slots 1 --link 1gbit --rack 2 --uplink 500mbit"
RAILS = "--hosts 4 --slots 1 --link 1gbit --rail 250mbit"
UNSHAPED = "--hosts 2 --slots 1"


def four_by_two(size_bytes: int) -> Judge:
    """Return the judge for 4 hosts with 2 ranks each at 1 Gbit/s."""
    return both(
        share(size_bytes, 0.93, 0.97),
        times(size_bytes, "gloo", "multiring", 1, 1.1),
        times(size_bytes, "mpich", "multiring", 1.6, 2),
    )


def mpi_engine(size_bytes: int, floor: float, aim: float) -> Judge:
    """Return a judge of multiring's schedules over an MPI, relative to that MPI's own.

    It also reports how they compare with multiring's sockets.
    """

    def sockets(records: list[Record]) -> Iterable[Verdict]:
        taken = ratios(ours(records, size_bytes, "multiring-mpi"), ours(records, size_bytes))
        figure = f"{statistics.median(taken):.2f} x [{min(taken):.2f}, {max(taken):.2f}]"
        yield Verdict(f"{size_name(size_bytes)}, tcp against mpi", figure, "none", "", holds=True)

    return both(times(size_bytes, "mpich", "multiring-mpi", floor, aim), sockets)


LINES = (
    *(Line(f"four-{size}", (command(FOUR, size * MIB, "gloo,mpich"),), four_by_two(size * MIB)) for size in (8, 32)),
    Line(
        "two",
        (command(TWO, 32 * MIB, "gloo"),),
        both(share(32 * MIB, 0.92, 0.96), times(32 * MIB, "gloo", "multiring", 1.5, 1.65)),
    ),
    Line("racks", (command(RACKS, 32 * MIB, "gloo"),), share(32 * MIB, 0.90, 0.95)),
    Line("rails", (command(RAILS, 32 * MIB, "none"),), share(32 * MIB, 0.90, 0.95)),
    Line(
        "wires",
        (command(FOUR, 32 * MIB, "multiring-bf16,multiring-int8"),),
        both(
            times(32 * MIB, "multiring", "multiring-bf16", 1.85, 1.95),
            times(32 * MIB, "multiring", "multiring-int8", 3.3, 3.7),
        ),
    ),
    Line("four-latency", (command(FOUR, 4 * KIB, "gloo"),), times(4 * KIB, "gloo", "multiring", 5, 10)),
    Line("mpi-8", (command(FOUR, 8 * MIB, "multiring-mpi,mpich"),), mpi_engine(8 * MIB, 1.4, 1.6)),
    Line("mpi-32", (command(FOUR, 32 * MIB, "multiring-mpi,mpich"),), mpi_engine(32 * MIB, 1.8, 2.1)),
    *(
        Line(
            f"unshaped-{size}",
            (command(UNSHAPED, size * MIB, "gloo,mpich,openmpi"),),
            against_best({size * MIB: (1, 1.2)}, "gloo", "mpich", "openmpi"),
        )
        for size in (8, 32)
    ),
    Line(
        "openmpi",
        (command(FOUR, 8 * MIB, "openmpi", "--alternations 1 --calls 2 --deadline-s 600"),),
        told(8 * MIB, "openmpi"),
        optional=True,
    ),
)


if __name__ == "__main__":
    sys.exit(main(LINES, __doc__))
