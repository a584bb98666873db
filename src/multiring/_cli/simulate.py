"""multiring simulate: predict the time of a training step on a cluster that need not exist.

The topology is a known cluster or a topology file, with one rank for each accelerator. The gradients are reduced in
buckets while backward continues, by the plans of `multiring plan`. The times of one rank alone are those of a profile
(multiring profile), or of a known model at a published rate, or that of --rate.

With --sweep NAME=V1,V2,..., repeated for other names, the command predicts every combination of the values, and names
the best.

With --against TIMELINE, the command grades a prediction part by part against a run of the profiled script that was
recorded by `multiring run --timeline`.

With --published FILE, the command predicts published runs instead, and grades its predictions.

For each number of ranks the command prints the time of a step and its 90 % interval, the samples a second, the
efficiency compared with one rank alone, the time of all communication, the part of it that backward does not hide, and
what bounds the step. With --failures-per-hour, it prints the goodput of a job that is restarted after a failure and of
an elastic one, too. --html FILE writes all values of --json as a page.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from multiring._cli.failing_hosts import add_failure_arguments, failures_of, failures_remark, goodputs
from multiring._cli.graded_run import show_graded_run
from multiring._cli.grading import show_grade
from multiring._cli.number_option import AMOUNT, COUNT
from multiring._cli.output import show, show_table
from multiring._cli.simulated_input import INPUT_OPTIONS, add_input_arguments
from multiring._cli.simulated_page import check_page, write_page
from multiring._cli.simulated_values import ClusterPrediction, described, usd_per_million
from multiring._cli.simulation import cluster_of, subject_of
from multiring._cli.sweep import add_sweep_arguments, rank_counts, show_sweep
from multiring._simulator.layers import model_names
from multiring._simulator.presets import preset_names
from multiring._simulator.step import SimulatedStep, part_of, step_of
from multiring.errors import ArgumentError

_HEAD = ("ranks", "hosts", "step ms", "90 %", "samples/s", "efficiency", "communication ms", "exposed ms", "bound by")
_ALL = (
    "--topology",
    "--model",
    "--profile",
    "--batch-per-rank",
    "--ranks",
    "--rate",
    "--sweep",
    "--against",
    "--noise-scale",
    "--least-samples",
    "--failures-per-hour",
    "--html",
    *INPUT_OPTIONS,
)
_INPUT_HEAD = ("input/s a rank", "input by")
_GOODPUT_HEAD = ("restarted", "elastic")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "--topology", metavar="NAME|FILE", help=f"one of {', '.join(preset_names())}, or a topology file"
    )
    parser.add_argument("--model", metavar="NAME", help=f"one of {', '.join(model_names())}")
    parser.add_argument(
        "--profile",
        action="append",
        type=Path,
        metavar="FILE",
        help="a profile of a script (multiring profile); several, each with another batch, give one --batch-per-rank",
    )
    parser.add_argument(
        "--batch-per-rank",
        type=COUNT,
        metavar="B",
        help="samples of a rank in one step (default: those of the profile)",
    )
    parser.add_argument(
        "--ranks",
        metavar="N,...",
        help="numbers of ranks (default: all of the cluster); powers: 1, 2, 4, 8, ... up to all",
    )
    parser.add_argument("--rate", type=AMOUNT, metavar="R", help="samples/s of one rank alone (default: as published)")
    parser.add_argument(
        "--against", type=Path, metavar="TIMELINE", help="with --profile: grade the prediction by a run's timeline"
    )
    add_input_arguments(parser)
    add_sweep_arguments(parser)
    add_failure_arguments(parser)
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="write the prediction as one page (default --ranks: powers)"
    )
    parser.add_argument("--published", metavar="FILE", help="predict the published runs in this file, and grade that")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Print the prediction for each number of ranks, or the grade of published runs, and return 0."""
    failures = failures_of(arguments)
    if arguments.published is not None:
        _refuse(arguments, _ALL, "--published", "the rows of a file say what to predict")
        return show_grade(arguments.published, as_json=arguments.json)
    alone = ("--failures-per-hour", "--html")
    if arguments.against is not None:
        _refuse(arguments, alone, "--against", "it grades the step of one run")
        return show_graded_run(arguments)
    if arguments.topology is None:
        raise ArgumentError(
            "--topology is missing: want --topology with --model and --batch-per-rank, or with --profile FILE; or "
            "--published FILE"
        )
    known, topology = cluster_of(arguments.topology)
    if arguments.sweep:
        _refuse(arguments, alone, "--sweep", "a sweep prints its points as a table or as JSON")
        return show_sweep(arguments, known, topology)
    _refuse(arguments, ("--noise-scale", "--least-samples"), "no --sweep", "they compare the points of a sweep")
    if arguments.html is not None:
        check_page(arguments.html)
    subject = subject_of(arguments, known)
    words = "powers" if arguments.ranks is None and arguments.html is not None else arguments.ranks
    steps = [
        step_of(subject.profile(count, subject.batch_per_rank, subject.exchange), part_of(topology, count))
        for count in rank_counts(words, topology, "--ranks ")
    ]
    prediction = ClusterPrediction(
        cluster=arguments.topology,
        known=known,
        topology=topology,
        subject=subject,
        steps=steps,
        failures=failures,
        goodputs=() if failures is None else goodputs(failures, steps, subject, topology),
    )
    values = described(prediction) if arguments.json or arguments.html is not None else {}
    if arguments.html is not None:
        write_page(arguments.html, values)
    if arguments.json:
        show(json.dumps(values, indent=1))
    elif arguments.html is None:
        _show_table(prediction)
    else:
        counts = sorted(step.ranks for step in steps)
        show(f"{arguments.html}: {subject.title}, on {counts[0]} to {counts[-1]} ranks")
    return 0


def _show_table(prediction: ClusterPrediction) -> None:
    subject, known, topology = prediction.subject, prediction.known, prediction.topology
    show(f"{topology if known is None else known.title}: {subject.title}")
    more = [tuple(f"{each:.1%}" for each in goodput.values()) for goodput in prediction.goodputs]
    is_fed = subject.feeding is not None
    rows = [
        (*_cells(step, subject.interval(step), is_fed=is_fed), *(more[at] if more else ()))
        for at, step in enumerate(prediction.steps)
    ]
    show_table([(*_HEAD, *(_INPUT_HEAD if is_fed else ()), *(_GOODPUT_HEAD if more else ())), *rows])
    if prediction.failures is not None:
        show(failures_remark(prediction.failures))
    for remark in subject.remarks:
        show(remark)
    last = prediction.steps[-1]
    if last.seconds.waiting:
        show(
            f"The profile's steps vary: all ranks wait for the slowest of {last.ranks}, which computes "
            f"{last.seconds.waiting * 1e3:.4g} ms longer than the median one."
        )
    usd = usd_per_million(last, known)
    if known is not None and usd is not None:
        show(f"{last.ranks} ranks cost {usd:.4g} USD for a million samples, at the price of {known.priced}.")


def _refuse(arguments: argparse.Namespace, options: Sequence[str], beside: str, why: str) -> None:
    for option in options:
        if getattr(arguments, option[2:].replace("-", "_")) is not None:
            raise ArgumentError(f"{beside} and {option}: {why}; leave out {option}")


def _cells(step: SimulatedStep, interval: tuple[float, float] | None, *, is_fed: bool) -> tuple[str, ...]:
    fed = (
        ()
        if step.input is None or not is_fed
        else (f"{step.batch / step.ranks / step.input.seconds:,.4g}", step.input.bound)
    )
    return (
        f"{step.ranks}",
        f"{step.hosts}",
        f"{step.seconds.total * 1e3:.4g}",
        interval_cell(interval),
        f"{step.samples_per_s:,.0f}",
        f"{step.efficiency:.1%}",
        f"{step.communication_s * 1e3:.4g}",
        f"{step.seconds.exchange * 1e3:.4g}",
        step.bound,
        *fed,
    )


def interval_cell(interval: tuple[float, float] | None) -> str:
    """Return an interval in milliseconds for a table."""
    return "-" if interval is None else f"{interval[0] * 1e3:.4g}-{interval[1] * 1e3:.4g}"
