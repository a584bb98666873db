"""multiring bench step: time a training step.

It is compared with DistributedDataParallel and with a step without communication.
"""

import argparse
import importlib.util
import json
import sys

from multiring._bench.job import Jobs
from multiring._bench.records import settings_lines
from multiring._bench.step import (
    OTHERS,
    PEERS,
    PEERS_ON_GPUS,
    USUAL,
    USUAL_ON_GPUS,
    StepBench,
    StepManner,
    StepQuestion,
    check_step_memory,
)
from multiring._bench.step_records import step_lines, step_records
from multiring._bench.workers.step_case import DEVICES, DTYPES, INDEPENDENT, NETWORKS, OURS
from multiring._cli import bench_lab
from multiring._cli.forecast import ForecastPrinter
from multiring._cli.number_option import COUNT, RANKS, SECONDS, whole
from multiring._cli.output import show
from multiring._schedule import WIRES
from multiring.errors import ArgumentError, LaunchError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `multiring bench step`."""
    batches = ", ".join(f"{name} {size.samples}" for name, size in NETWORKS.items())
    what = parser.add_argument_group("what")
    what.add_argument(
        "--networks",
        metavar="NAME,...",
        help=f"names from {', '.join(NETWORKS)}; default {','.join(USUAL)}, and {','.join(USUAL_ON_GPUS)} on GPUs",
    )
    what.add_argument(
        "--device", default=DEVICES[0], choices=DEVICES, help=f"the devices of the models (default {DEVICES[0]})"
    )
    what.add_argument(
        "--against",
        metavar="NAME,...|none",
        help=f"other libraries: ddp (the default), {', '.join(OTHERS)} (with --device cuda, the default is "
        f"{','.join(PEERS_ON_GPUS)}) and, in a lab, "
        f"{', '.join(f'multiring-{wire}' for wire in WIRES)} (wire types)",
    )
    what.add_argument(
        "--leave-out",
        default="",
        metavar="NAME,...",
        help=f"names to leave out of the two that otherwise always take part: {OURS}, {INDEPENDENT}",
    )
    what.add_argument(
        "--emulate",
        action="store_true",
        help="if there are fewer cores than ranks, sleep for the time that the computation takes on a free core",
    )
    what.add_argument("--ranks", type=RANKS, metavar="N", help="number of ranks on this host (default 2)")
    what.add_argument("--threads", type=RANKS, default=1, metavar="N", help="threads of each rank (default 1)")
    what.add_argument("--batch", type=COUNT, metavar="N", help=f"samples per rank (default {batches})")
    what.add_argument(
        "--dtype", default=DTYPES[0], help=f"type of the arithmetic: {', '.join(DTYPES)} (default {DTYPES[0]})"
    )
    what.add_argument(
        "--image-size", type=COUNT, default=224, metavar="N", help="pixels of an image's side (default 224)"
    )
    how = parser.add_argument_group("how")
    how.add_argument("--alternations", type=COUNT, default=7, metavar="N", help="jobs of each library (default 7)")
    how.add_argument("--steps", type=COUNT, default=10, metavar="N", help="timed steps of a job (default 10)")
    how.add_argument("--warmup", type=whole(0), default=2, metavar="N", help="untimed steps at the start (default 2)")
    how.add_argument(
        "--deadline-s", type=SECONDS, default=600.0, metavar="S", help="time limit of one job (default 600)"
    )
    parser.add_argument_group("output").add_argument(
        "--json", action="store_true", help="print one JSON object per line instead of tables"
    )
    bench_lab.add_options(parser.add_argument_group("in a lab (as root)"))


def run(arguments: argparse.Namespace) -> int:
    """Time a training step of every network, print the results, and return 0.

    Raises:
        MultiringError: StepBench.compare failed, or an argument is invalid.
    """
    if importlib.util.find_spec("torch") is None:
        raise LaunchError(f"there is no torch to train with; install it with: {sys.executable} -m pip install torch")
    plan = bench_lab.plan_of(arguments)
    ranks = bench_lab.ranks_of(arguments, plan)
    is_on_host = arguments.device == DEVICES[0]
    if plan is not None and not is_on_host:
        raise ArgumentError(f"--device {arguments.device} is for this host's GPUs, not for a lab: omit --hosts")
    networks = arguments.networks or ",".join(USUAL if is_on_host else USUAL_ON_GPUS)
    questions = [
        StepQuestion(
            network=network,
            ranks=ranks,
            hosts=1 if plan is None else plan.hosts,
            threads=arguments.threads,
            batch=arguments.batch,
            dtype=arguments.dtype,
            image_size=arguments.image_size,
            is_emulated=arguments.emulate,
            device=arguments.device,
        )
        for network in networks.split(",")
    ]
    for question in questions:
        check_step_memory(question)
    manner = StepManner(alternations=arguments.alternations, steps=arguments.steps, warmup=arguments.warmup)
    jobs = Jobs(arguments.deadline_s)
    circumstances = bench_lab.circumstances_of(plan)
    against = bench_lab.against_of(arguments)
    if not arguments.json:
        show("\n".join(circumstances.lines()))
    with jobs:
        launcher = None if plan is None else bench_lab.command_of(plan)("multiring")
        forecast = ForecastPrinter(manner.alternations * len(questions), _tell, _tell if sys.stderr.isatty() else None)
        bench = StepBench(
            jobs,
            manner,
            (PEERS if is_on_host else PEERS_ON_GPUS) if against is None else against,
            leave_out=tuple(filter(None, arguments.leave_out.split(","))),
            launcher=launcher,
            tell=forecast.record,
        )
        forecast.begin(manner.alternations * len(questions) * bench.libraries, None)
        for question in questions:
            comparison = bench.compare(question)
            lines = ["", *step_lines(comparison), *settings_lines(comparison.timings)]
            if arguments.json:
                lines = [json.dumps(record) for record in step_records(comparison, circumstances)]
            show("\n".join(lines))
    return 0


def _tell(text: str) -> None:
    print(f"multiring: {text}", file=sys.stderr, flush=True)
