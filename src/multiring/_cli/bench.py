"""multiring bench: time a collective or a training step against other libraries, alternating in one run.

Results are verified before calls are timed. `multiring bench all_reduce --help` shows the options. `--install PEER,...`
makes the environments of libraries that cannot share multiring's.
"""

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path

from multiring._bench.cases import LEAST_POOLED_BYTES, Question, parse_size, size_text
from multiring._bench.compare import Bench, Comparison, Manner, check_memory
from multiring._bench.install import install
from multiring._bench.job import Jobs, StoppedError, WrongResultError
from multiring._bench.libraries import libraries
from multiring._bench.plot import check_plot, plot
from multiring._bench.records import Circumstances, lines_of, records_of, settings_lines
from multiring._bench.workers.contract import COLLECTIVES, DTYPES, OPS
from multiring._cli import bench_device, bench_lab, bench_step
from multiring._cli.forecast import ForecastPrinter
from multiring._cli.number_option import COUNT, RANKS, SECONDS, whole
from multiring._cli.output import READER_GONE, ReaderGoneError, show
from multiring.errors import ArgumentError

_SIZES = "64,64KiB,1MiB,8MiB,64MiB"
_WRONG = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--install", metavar="PEER,...", help="install these libraries to compare with, and exit")
    kinds = parser.add_subparsers(dest="kind", metavar="COLLECTIVE")
    for collective in COLLECTIVES:
        text = f"Time {collective} against other libraries, each verified first, alternating in one run."
        _add_options(kinds.add_parser(collective, help=f"time {collective}", description=text, allow_abbrev=False))

    text = "Time a training step against DistributedDataParallel and against a step without communication."
    bench_step.add_arguments(
        kinds.add_parser("step", help="time a training step", description=text, allow_abbrev=False)
    )


def _add_options(parser: argparse.ArgumentParser) -> None:
    what = parser.add_argument_group("what")
    what.add_argument("--against", metavar="PEER,...|none", help="other libraries (default: all installed ones)")
    what.add_argument("--ranks", type=RANKS, metavar="N", help="number of ranks on this host (default 2)")
    what.add_argument("--sizes", metavar="SIZE,...", help=f"sizes of each rank's buffer (default {_SIZES})")
    what.add_argument(
        "--device",
        default="cpu",
        choices=bench_device.DEVICES,
        help="cuda: time all_reduce of CUDA tensors by multiring.torch, Gloo and NCCL (default cpu); several GPUs: "
        "verified on stand-ins only",
    )
    what.add_argument("--dtype", default="float32", help=", ".join(DTYPES))
    what.add_argument("--op", default="sum", help=", ".join(OPS))
    what.add_argument(
        "--buffers",
        default="arena",
        choices=["arena", "ordinary"],
        help="buffers in multiring's own memory, or in ordinary memory (default arena)",
    )
    how = parser.add_argument_group("how")
    how.add_argument("--alternations", type=COUNT, default=7, metavar="N", help="turns of all libraries (default 7)")
    how.add_argument(
        "--seconds", type=SECONDS, metavar="S", help="duration of a job's timed calls (default 0.5, and 5 in a lab)"
    )
    how.add_argument(
        "--calls",
        type=COUNT,
        metavar="N",
        help="number of timed calls of a job (default: as many as fit into --seconds)",
    )
    how.add_argument(
        "--pool-mib",
        type=whole(0),
        default=512,
        metavar="MIB",
        help="time also with a pool: buffers of 64 KiB or more rotate over MIB of memory per rank; 0: no pool "
        "(default 512)",
    )
    how.add_argument("--no-one", action="store_true", help="time with the pool only, not with a single buffer")
    how.add_argument(
        "--together", action="store_true", help="run one job per library for all sizes: fewer starts, for many ranks"
    )
    how.add_argument(
        "--deadline-s", type=SECONDS, default=300.0, metavar="S", help="time limit of one job (default 300)"
    )
    out = parser.add_argument_group("output")
    out.add_argument("--json", action="store_true", help="print one JSON object per line instead of tables")
    out.add_argument("--plot", type=Path, metavar="FILE", help="also draw a figure (.png, .svg, .pdf)")
    bench_lab.add_options(parser.add_argument_group("in a lab (as root)"))


def run(arguments: argparse.Namespace) -> int:
    """Run the bench and return the exit code.

    0: done. 1: a library computed a wrong result. 128 + n: signal n ended the bench. 141: the reader of its output
    has ended.
    """
    try:
        if arguments.install is not None:
            for name in arguments.install.split(","):
                install(name, show)
            return 0
        if arguments.kind is None:
            raise ArgumentError(f"nothing to time: name step, or one of {', '.join(COLLECTIVES)}")
        if arguments.kind == "step":
            return bench_step.run(arguments)
        return _bench(arguments) if arguments.device == "cpu" else bench_device.run(arguments)
    except ReaderGoneError:
        return READER_GONE
    except WrongResultError as error:
        print(f"multiring: {error}", file=sys.stderr)
        return _WRONG
    except StoppedError as error:
        print(f"multiring: {error}", file=sys.stderr)
        return error.exit_code


def _bench(arguments: argparse.Namespace) -> int:
    plan = bench_lab.plan_of(arguments)
    ranks = bench_lab.ranks_of(arguments, plan)
    cases = list(_cases(arguments, ranks, 1 if plan is None else plan.hosts))
    if not cases:
        raise ArgumentError(_why_nothing(arguments))
    manner = _manner(arguments, in_lab=plan is not None)
    jobs = Jobs(arguments.deadline_s)
    if arguments.plot is not None:
        _check_plot(arguments)
    command = None if plan is None else bench_lab.command_of(plan)
    against = bench_lab.against_of(arguments)
    chosen, left_out = libraries(against, command)
    circumstances = bench_lab.circumstances_of(plan)
    for line in left_out:
        _tell(f"left out: {line}")
    if not arguments.json:
        show("\n".join(circumstances.lines()))
    wires = None if plan is None else bench_lab.wires_of(plan)
    made: list[Comparison] = []
    with jobs:
        rounds = 1 if arguments.together else len(cases)
        forecast = ForecastPrinter(rounds * manner.alternations, _tell, _tell if sys.stderr.isatty() else None)
        each_s = _START_S + _START_OF_RANK_S * ranks + (manner.warm_s + manner.seconds) * len(cases) / rounds
        count = rounds * manner.alternations * len(chosen)
        forecast.begin(count, count * each_s)
        bench = Bench(jobs, chosen, manner, forecast.record)
        for at, together in enumerate([cases] if arguments.together else [[case] for case in cases]):
            first = together[0][0]
            if not sys.stderr.isatty():  # on a terminal the forecast shows every step
                _tell(f"{_title(together)}: {at + 1} of {1 if arguments.together else len(cases)}")
            bound = bench_lab.bound(first, plan, wires) if plan is not None and wires is not None else None
            for comparison in bench.compare_together(together, bound):
                made.append(comparison)
                _show(comparison, circumstances, as_json=arguments.json)
    if not arguments.json:
        show("\n".join(settings_lines(made[-1].timings)))
    if arguments.plot is not None:
        plot(made, arguments.plot)
    return 0


_START_S, _START_OF_RANK_S = 1.0, 0.5  # start of a job: a fixed part, and a part per rank, with one core per rank


def _title(together: list[tuple[Question, int]]) -> str:
    pools = {pool: f", rotating over {size_text(pool)}" if pool else "" for _, pool in together}
    sizes = ", ".join(dict.fromkeys(f"{size_text(question.size_bytes)}{pools[pool]}" for question, pool in together))
    return f"timing {together[0][0].collective} of {sizes}"


def _manner(arguments: argparse.Namespace, *, in_lab: bool) -> Manner:
    usual_s = 5.0 if in_lab else 0.5
    return Manner(
        buffers=arguments.buffers,
        alternations=arguments.alternations,
        calls=arguments.calls,
        # A lab's token buckets let the first bursts pass at full speed. So the warm-up empties the buckets, and the
        # timing takes longer.
        seconds=usual_s if arguments.seconds is None else arguments.seconds,
        most_calls=100_000 if in_lab else 5000,
        warm_s=1.0 if in_lab else 0.0,
    )


def _cases(arguments: argparse.Namespace, ranks: int, hosts: int) -> Iterable[tuple[Question, int]]:
    """Yield (question, pool size in bytes) for each size, with one buffer (pool 0) and with the pool."""
    if arguments.together and hosts > 1:
        raise ArgumentError(
            "--together works on one host only, because in a lab each size has its own bound: omit --together or "
            "--hosts"
        )
    if arguments.no_one and arguments.pool_mib == 0:
        raise ArgumentError("--no-one and --pool-mib 0 leave nothing to time")
    given = _SIZES if arguments.sizes is None else arguments.sizes
    sizes = [0] if arguments.kind == "barrier" else [parse_size(text) for text in given.split(",")]
    for size_bytes in sizes:
        question = Question(
            collective=arguments.kind,
            ranks=ranks,
            hosts=hosts,
            size_bytes=size_bytes,
            dtype=arguments.dtype,
            op=arguments.op,
        )
        pool_bytes = arguments.pool_mib << 20
        # A pool makes a difference on one host only. Between hosts the network is the limit, not the cache.
        has_pool = pool_bytes > 0 and size_bytes >= LEAST_POOLED_BYTES and hosts == 1
        check_memory(question, pool_bytes if has_pool else 0)
        if not arguments.no_one:
            yield question, 0
        if has_pool:
            yield question, pool_bytes


def _check_plot(arguments: argparse.Namespace) -> None:
    if arguments.kind == "barrier":
        raise ArgumentError(f"--plot {arguments.plot}: a barrier has no sizes to plot; use another collective")
    check_plot(arguments.plot)


def _why_nothing(arguments: argparse.Namespace) -> str:
    if arguments.kind == "barrier":
        return "nothing would be timed: --no-one asks for a pool of buffers, and a barrier has no buffers; omit it"
    return (
        "nothing would be timed: --no-one leaves the pool only, and the pool is for one host and sizes from "
        f"{size_text(LEAST_POOLED_BYTES)} on; omit it, or give such --sizes without --hosts"
    )


def _show(comparison: Comparison, circumstances: Circumstances, *, as_json: bool) -> None:
    if as_json:
        lines = [json.dumps(record) for record in records_of(comparison, circumstances)]
    else:
        lines = ["", *lines_of(comparison)]
    show("\n".join(lines))


def _tell(text: str) -> None:
    print(f"multiring: {text}", file=sys.stderr, flush=True)
