"""multiring bench: time a collective beside other libraries, each verified first, alternating in one run.

`multiring bench all_reduce --help` has the options.
"""

import argparse
import shlex
import sys

from multiring.bench.cases import Question, parse_size
from multiring.bench.compare import BOUND, OURS, Bench, Library, Manner, OwnWorker
from multiring.bench.job import Jobs, StoppedError, WrongResultError
from multiring.bench.machine import commit, hardware, ping_pong_us
from multiring.bench.records import Circumstances, lines_of
from multiring.bench.workers.contract import COLLECTIVES, OPS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="COLLECTIVE")
    for collective in COLLECTIVES:
        _add_options(kinds.add_parser(collective, help=f"time {collective}", description=__doc__))


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--against", metavar="PEER,...", default="gloo", help="which libraries")
    parser.add_argument("--ranks", type=int, default=2, metavar="N")
    parser.add_argument("--sizes", default="64,1MiB,8MiB", metavar="SIZE,...")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--op", default="sum", help=", ".join(OPS))
    parser.add_argument("--buffers", default="arena", choices=["arena", "ordinary"])
    parser.add_argument("--alternations", type=int, default=7)
    parser.add_argument("--calls", type=int)
    parser.add_argument("--pool-mib", type=int, default=512)
    parser.add_argument("--deadline-s", type=float, default=300.0)
    parser.add_argument("--json", action="store_true")


def _launcher(ranks: int) -> tuple[str, ...]:
    return (sys.executable, "-m", "multiring", "run", "-n", str(ranks), "--")


def run(arguments: argparse.Namespace) -> int:
    """Exit with 1 where a library computes something wrong."""
    libraries: list[Library] = [
        OwnWorker(OURS, "shm", "multiring_worker.py", _launcher),
        OwnWorker("gloo", "tcp", "gloo.py", _launcher),
        OwnWorker(BOUND, "memory", "bound.py", _launcher),
    ]
    questions = [
        Question(
            collective=arguments.kind,
            ranks=arguments.ranks,
            size_bytes=parse_size(text),
            dtype=arguments.dtype,
            op=arguments.op,
        )
        for text in arguments.sizes.split(",")
    ]
    manner = Manner(buffers=arguments.buffers, alternations=arguments.alternations, calls=arguments.calls)
    circumstances = Circumstances(
        hardware=hardware(),
        commit=commit(),
        command=shlex.join(["multiring", *sys.argv[1:]]),
        ping_pong_us=ping_pong_us(),
    )
    if not arguments.json:
        print("\n".join(circumstances.lines()))
    try:
        with Jobs(arguments.deadline_s) as jobs:
            bench = Bench(jobs, libraries, manner)
            for question in questions:
                comparison = bench.compare(question)
                print("\n".join(lines_of(comparison)), flush=True)
    except WrongResultError as error:
        print(f"multiring: {error}", file=sys.stderr)
        return 1
    except StoppedError as error:
        print(f"multiring: {error}", file=sys.stderr)
        return error.exit_code
    return 0
