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
what bounds the step.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from multiring._cli.graded_run import show_graded_run
from multiring._cli.grading import show_grade
from multiring._cli.output import show, show_table
from multiring._cli.simulation import Subject, cluster_of, subject_of
from multiring._cli.sweep import add_sweep_arguments, rank_counts, show_sweep
from multiring._simulator.layers import model_names
from multiring._simulator.presets import Preset, preset_names
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
)


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
        "--batch-per-rank", type=int, metavar="B", help="samples of a rank in one step (default: those of the profile)"
    )
    parser.add_argument(
        "--ranks",
        metavar="N,...",
        help="numbers of ranks (default: all of the cluster); powers: 1, 2, 4, 8, ... up to all",
    )
    parser.add_argument("--rate", type=float, metavar="R", help="samples/s of one rank alone (default: as published)")
    parser.add_argument(
        "--against", type=Path, metavar="TIMELINE", help="with --profile: grade the prediction by a run's timeline"
    )
    add_sweep_arguments(parser)
    parser.add_argument("--published", metavar="FILE", help="predict the published runs in this file, and grade that")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Print the prediction for each number of ranks, or the grade of published runs, and return 0."""
    if arguments.published is not None:
        _refuse(arguments, _ALL, "--published", "the rows of a file say what to predict")
        return show_grade(arguments.published, as_json=arguments.json)
    if arguments.against is not None:
        return show_graded_run(arguments)
    if arguments.topology is None:
        raise ArgumentError(
            "--topology is missing: want --topology with --model and --batch-per-rank, or with --profile FILE; or "
            "--published FILE"
        )
    known, topology = cluster_of(arguments.topology)
    if arguments.sweep:
        return show_sweep(arguments, known, topology)
    _refuse(arguments, ("--noise-scale", "--least-samples"), "no --sweep", "they compare the points of a sweep")
    subject = subject_of(arguments, known)
    counts = rank_counts(arguments.ranks, topology, "--ranks ")
    steps = [
        step_of(subject.profile(count, subject.batch_per_rank, subject.exchange), part_of(topology, count))
        for count in counts
    ]
    if arguments.json:
        show(json.dumps(_described(arguments.topology, subject, known, steps), indent=1))
        return 0
    show(f"{topology if known is None else known.title}: {subject.title}")
    show_table([_HEAD, *(_cells(step, subject.interval(step)) for step in steps)])
    for remark in subject.remarks:
        show(remark)
    if known is not None and known.usd_per_host_hour is not None:
        last = steps[-1]
        usd = last.hosts * known.usd_per_host_hour / 3600 / last.samples_per_s * 1e6
        show(f"{last.ranks} ranks cost {usd:.4g} USD for a million samples, at the price of {known.priced}.")
    return 0


def _refuse(arguments: argparse.Namespace, options: Sequence[str], beside: str, why: str) -> None:
    for option in options:
        if getattr(arguments, option[2:].replace("-", "_")) is not None:
            raise ArgumentError(f"{beside} and {option}: {why}; leave out {option}")


def _cells(step: SimulatedStep, interval: tuple[float, float] | None) -> tuple[str, ...]:
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
    )


def _described(
    cluster: str, subject: Subject, known: Preset | None, steps: Sequence[SimulatedStep]
) -> dict[str, object]:
    """Return the JSON object: times in seconds."""
    return {
        "topology": cluster,
        "batch_per_rank": subject.batch_per_rank,
        **subject.described,
        "sources_of_topology": {} if known is None else dict(known.sources),
        "steps": [described_step(step, subject.interval(step)) for step in steps],
    }


def interval_cell(interval: tuple[float, float] | None) -> str:
    """Return an interval in milliseconds for a table."""
    return "-" if interval is None else f"{interval[0] * 1e3:.4g}-{interval[1] * 1e3:.4g}"


def described_step(step: SimulatedStep, interval: tuple[float, float] | None) -> dict[str, object]:
    """Return a step for JSON: times in seconds."""
    return {
        "ranks": step.ranks,
        "hosts": step.hosts,
        "step_s": step.seconds.total,
        "step_90_s": interval,
        "compute_s": step.seconds.compute,
        "exposed_s": step.seconds.exchange,
        "update_s": step.seconds.update,
        "outside_s": step.seconds.outside,
        "communication_s": step.communication_s,
        "samples_per_s": step.samples_per_s,
        "efficiency": step.efficiency,
        "bound": step.bound,
        "buckets": [asdict(each) for each in step.buckets],
    }
