"""Check the performance floors of one host, one `multiring bench` per line.

    python benchmarks/promises/floors.py [--only NAME,...] [--again | --keep] [--list]

The records of each line are kept in build/floors/NAME.jsonl, so a long run can be interrupted and continued. A line is
measured if it has no records, if its records are of another commit, or with --again. With --keep, records of another
commit suffice. A tree with uncommitted changes counts as one commit, whatever the changes are. A floor holds if the
median ratio reaches it. The exit code is 1 if a floor does not hold. Figures are marked if the machine did other work
during the measurement; such figures prove nothing.

Horovod takes part only in the lines `arena` and `four-ranks`. Each of its jobs imports TensorFlow first, which takes
longer than the timing. As these two lines show, it is never near the fastest peer, so no other floor depends on it.
"""

import argparse
import json
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from multiring._bench.machine import commit

ROOT = Path(__file__).parents[2]
KEPT = ROOT / "build" / "floors"
PEERS = "gloo,mpich,openmpi"
MIB = 2**20

Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result for one floor; `figure` is the measurement as text."""

    what: str
    figure: str
    floor: str
    aim: str
    holds: bool


@dataclass(frozen=True, slots=True)
class Line:
    """Commands for `multiring bench`, and the judge of their records.

    An `optional` line runs only if --only names it.
    """

    name: str
    commands: tuple[str, ...]
    judge: Callable[[list[Record]], Iterable[Verdict]]
    optional: bool = False


def ours(records: list[Record], size_bytes: int, library: str = "multiring", **fields: object) -> Record:
    """Return the record of multiring or of another library, for a size."""
    wanted = {"library": library, "size_bytes": size_bytes, **fields}
    (record,) = [each for each in records if all(each.get(name) == value for name, value in wanted.items())]
    return record


def peers(records: list[Record], size_bytes: int, *names: str, **fields: object) -> list[Record]:
    """Return the records of a size with figures, of all or the named peers."""
    return [
        each
        for each in records
        if each["size_bytes"] == size_bytes
        and each["library"] != "multiring"
        and (not names or each["library"] in names)
        and "median_s" in each
        and all(each.get(name) == value for name, value in fields.items())
    ]


def ratios(peer: Record, own: Record) -> list[float]:
    """Return how many times faster `own` was than the peer, for each alternation."""
    return [their / our for their, our in zip(peer["seconds"], own["seconds"], strict=True)]


def against_best(sizes: dict[int, tuple[float, float]], *names: str) -> Callable[[list[Record]], Iterable[Verdict]]:
    """Return a judge of the ratio to the fastest peer, among all or the named peers.

    Each size has a floor and an aim.
    """

    def judge(records: list[Record]) -> Iterable[Verdict]:
        for size_bytes, (floor, aim) in sizes.items():
            own = ours(records, size_bytes)
            best = min(peers(records, size_bytes, *names), key=lambda record: float(record["median_s"]))
            taken = ratios(best, own)
            middle = statistics.median(taken)
            # The interval in the records is for the fastest of all peers. The range shown here is wider than any 95 %
            # interval.
            figure = f"{middle:.2f} x {best['library']} [{min(taken):.2f}, {max(taken):.2f}]"
            yield Verdict(f"{size_bytes / MIB:g} MiB", figure, f"{floor:g} x", f"{aim:g} x", middle >= floor)

    return judge


def latency(records: list[Record]) -> Iterable[Verdict]:
    """Judge the latency of 64 B: at most twice the faster MPI's time."""
    own = ours(records, 64)
    best = min(peers(records, 64, "mpich", "openmpi"), key=lambda record: float(record["median_s"]))
    times = 1 / statistics.median(ratios(best, own))
    figure = f"{own['median_s'] * 1e6:.2f} us, {times:.2f} x {best['library']}'s"
    yield Verdict("64 B", figure, "<= 2 x", "1 x", times <= 2)


def half_the_bytes(records: list[Record]) -> Iterable[Verdict]:
    """Judge the speed of bfloat16 relative to float32 for the same number of elements.

    The records come from two commands, with all their alternations.
    """
    medians = {}
    for dtype in ("float32", "bfloat16"):
        own = [each for each in records if each["library"] == "multiring" and each["dtype"] == dtype]
        medians[dtype] = statistics.median(second for record in own for second in record["seconds"])
    times = medians["float32"] / medians["bfloat16"]
    yield Verdict("16 Mi elements", f"{times:.2f} x float32", "1.7 x", "1.9 x", times >= 1.7)


def faster(size_bytes: int) -> Callable[[list[Record]], Iterable[Verdict]]:
    """Return a judge of whether multiring is faster than the fastest peer."""

    def judge(records: list[Record]) -> Iterable[Verdict]:
        best = min(peers(records, size_bytes), key=lambda record: float(record["median_s"]))
        ratio = statistics.median(ratios(best, ours(records, size_bytes)))
        yield Verdict(f"{size_bytes / MIB:g} MiB", f"{ratio:.2f} x {best['library']}", "> 1 x", "", ratio > 1)

    return judge


def three_of_four(records: list[Record]) -> Iterable[Verdict]:
    """Judge the other collectives.

    Three must be faster than the fastest peer, and the fourth within 10 %.
    """
    figures = {}
    for collective in ("reduce_scatter", "all_gather", "broadcast", "all_to_all"):
        own = ours(records, 8 * MIB, collective=collective)
        best = min(peers(records, 8 * MIB, collective=collective), key=lambda record: float(record["median_s"]))
        figures[collective] = statistics.median(ratios(best, own))
        text = f"{figures[collective]:.2f} x {best['library']}"
        yield Verdict(f"{collective} 8 MiB", text, "0.9 x", "> 1 x", figures[collective] >= 0.9)
    faster = sum(figure > 1 for figure in figures.values())
    yield Verdict("faster than the best", f"{faster} of 4", "3 of 4", "4 of 4", faster >= 3)


def no_waiting(records: list[Record]) -> Iterable[Verdict]:
    """Judge the speed of the training step relative to independent processes.

    ResNet-50 has a floor; for the other networks, report the exposed time.
    """
    for record in (each for each in records if each["library"] == "multiring"):
        exposed = f"{record['exposed_s'] * 1e3:.1f} ms exposed"
        figure = f"{record['ratio']:.3f} of independent processes' speed, {exposed}"
        if record["network"] == "resnet50":
            yield Verdict("resnet50", figure, "0.97", "0.99", record["ratio"] >= 0.97)
        else:
            yield Verdict(record["network"], figure, "none", "", holds=True)


TWO = f"--ranks 2 --against {PEERS}"
LINES = (
    Line(
        "arena",
        (f"all_reduce {TWO},horovod --buffers arena --sizes 1MiB,8MiB,64MiB --pool-mib 0",),
        against_best({1 * MIB: (3.5, 5), 8 * MIB: (2.5, 3), 64 * MIB: (5, 6)}),
    ),
    Line(
        "ordinary",
        (f"all_reduce {TWO} --buffers ordinary --sizes 1MiB,8MiB,64MiB --pool-mib 0",),
        against_best({1 * MIB: (0.9, 1.1), 8 * MIB: (1.05, 1.2), 64 * MIB: (2, 2.2)}),
    ),
    Line(
        "ordinary-gloo",
        ("all_reduce --against gloo --buffers ordinary --sizes 64KiB,256KiB,1MiB,4MiB,16MiB,64MiB --pool-mib 0",),
        against_best({size * MIB // 16: (3, 4) for size in (1, 4, 16, 64, 256, 1024)}, "gloo"),
    ),
    Line(
        "four-ranks",
        (f"all_reduce --ranks 4 --against {PEERS},horovod --buffers arena --sizes 8MiB,64MiB --pool-mib 0",),
        against_best({8 * MIB: (3.5, 4), 64 * MIB: (5, 6.5)}),
    ),
    Line("latency", ("all_reduce --ranks 2 --against mpich,openmpi --sizes 64 --calls 5000 --pool-mib 0",), latency),
    Line(
        "bfloat16",
        (
            "all_reduce --ranks 2 --against gloo --buffers arena --sizes 64MiB --pool-mib 0",
            "all_reduce --ranks 2 --against gloo --buffers arena --sizes 32MiB --dtype bfloat16 --pool-mib 0",
        )
        * 2,  # the commands alternate, because their records are compared with each other
        half_the_bytes,
    ),
    Line(
        "pool",
        (f"all_reduce {TWO} --buffers arena --sizes 1MiB,8MiB,64MiB --pool-mib 512 --no-one",),
        against_best({1 * MIB: (3, 4), 8 * MIB: (2, 2.5), 64 * MIB: (3, 4)}),
    ),
    Line(
        "shared-window",
        ("all_reduce --ranks 2 --against mpich_window,openmpi_window --buffers arena --sizes 8MiB --pool-mib 0",),
        faster(8 * MIB),
    ),
    Line(
        "others",
        tuple(
            f"{collective} {TWO} --buffers arena --sizes 8MiB --pool-mib 0"
            for collective in ("reduce_scatter", "all_gather", "broadcast", "all_to_all")
        ),
        three_of_four,
    ),
    Line("step", ("step --ranks 2 --threads 1",), no_waiting),
)


def measured(line: Line, *, again: bool, keep: bool) -> list[Record]:
    """Return the line's records, measured now if necessary."""
    kept = KEPT / f"{line.name}.jsonl"
    if again or not kept.exists() or not (keep or commits_of(read(kept)) == {commit()}):
        KEPT.mkdir(parents=True, exist_ok=True)
        texts = []
        for command in line.commands:
            words = [sys.executable, "-m", "multiring", "bench", *shlex.split(command), "--json"]
            done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=False)  # noqa: S603 -- our own
            if done.returncode != 0:
                raise SystemExit(f"{line.name}: multiring bench {command}: exit code {done.returncode}")
            texts.append(done.stdout)
        unfinished = kept.with_suffix(".new")
        unfinished.write_text("".join(texts), encoding="utf-8")
        unfinished.replace(kept)
    return read(kept)


def read(kept: Path) -> list[Record]:
    """Return the records of a file."""
    return [json.loads(text) for text in kept.read_text(encoding="utf-8").splitlines()]


def commits_of(records: list[Record]) -> set[str]:
    """Return the commits of the records; a record without figures has no commit."""
    return {record["commit"] for record in records if "commit" in record}


def main(lines: Sequence[Line] = LINES, description: str | None = __doc__) -> int:
    """Print every floor of `lines` and whether it holds; return the exit code."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [line.name for line in lines]
    usual = ",".join(line.name for line in lines if not line.optional)
    parser.add_argument("--only", metavar="NAME,...", default=usual, help=", ".join(names))
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--again", action="store_true", help="measure even if there are records")
    which.add_argument("--keep", action="store_true", help="judge existing records, even of another commit")
    parser.add_argument("--list", action="store_true", help="print the commands and measure nothing")
    args = parser.parse_args()
    chosen = args.only.split(",")
    if unknown := [name for name in chosen if name not in names]:
        parser.error(f"unknown {', '.join(unknown)}; known are {', '.join(names)}")
    held = True
    for line in (line for line in lines if line.name in chosen):
        print(line.name, flush=True)
        for command in line.commands:
            print(f"  multiring bench {command}", flush=True)
        if args.list:
            continue
        records = measured(line, again=args.again, keep=args.keep)
        for verdict in line.judge(records):
            held &= verdict.holds
            aim = f", aim {verdict.aim}" if verdict.aim else ""
            word = "holds " if verdict.holds else "MISSED"
            print(f"    {word} {verdict.what}: {verdict.figure} (floor {verdict.floor}{aim})")
        print(f"    at commit {', '.join(sorted(commits_of(records)))}")
        if not all(record.get("publishable", True) for record in records):
            most = max(record.get("other_cores", 0.0) for record in records)
            print(f"    not publishable: other work took up to {most:.0%} of a core, or the alternations were too few")
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
