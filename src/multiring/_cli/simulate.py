"""multiring simulate: predict the time of a training step on a cluster that need not exist.

The topology is a known cluster or a topology file, with one rank for each accelerator. The model's gradients are
reduced in buckets while backward continues, by the plans of `multiring plan`. The rate of one rank alone is a
published one, or that of --rate.

With --published FILE, the command predicts published runs instead, and grades its predictions.

For each number of ranks the command prints the time of a step, the samples a second, the efficiency compared with one
rank alone, the time of all communication, the part of it that backward does not hide, and what bounds the step.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from multiring._cli.grading import show_grade
from multiring._cli.output import show
from multiring._runtime.rails.topology_file import read_topology
from multiring._simulator.layers import layers_of, model_names, units_of
from multiring._simulator.presets import Preset, preset, preset_names
from multiring._simulator.rates import rate_of
from multiring._simulator.step import SimulatedStep, part_of, profile_of, step_of
from multiring._topology import Topology
from multiring.errors import ArgumentError

_HEAD = ("ranks", "hosts", "step ms", "samples/s", "efficiency", "communication ms", "exposed ms", "bound by")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "--topology", metavar="NAME|FILE", help=f"one of {', '.join(preset_names())}, or a topology file"
    )
    parser.add_argument("--model", metavar="NAME", help=f"one of {', '.join(model_names())}")
    parser.add_argument("--batch-per-rank", type=int, metavar="B", help="samples of a rank in one step")
    parser.add_argument("--ranks", metavar="N,...", help="numbers of ranks (default: all of the cluster)")
    parser.add_argument("--sweep", action="store_true", help="1, 2, 4, 8, ... ranks, up to all of the cluster")
    parser.add_argument("--rate", type=float, metavar="R", help="samples/s of one rank alone (default: as published)")
    parser.add_argument("--published", metavar="FILE", help="predict the published runs in this file, and grade that")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Print the prediction for each number of ranks, or the grade of published runs, and return 0."""
    if arguments.published is not None:
        for option in ("--topology", "--model", "--batch-per-rank", "--ranks", "--rate", "--sweep"):
            if getattr(arguments, option[2:].replace("-", "_")) not in (None, False):
                raise ArgumentError(
                    f"--published and {option}: the rows of a file say what to predict; leave out {option}"
                )
        return show_grade(arguments.published, as_json=arguments.json)
    for option in ("--topology", "--model", "--batch-per-rank"):
        if getattr(arguments, option[2:].replace("-", "_")) is None:
            raise ArgumentError(
                f"{option} is missing: want --topology, --model and --batch-per-rank, or --published FILE"
            )
    known, topology = _cluster(arguments.topology)
    units = units_of(layers_of(arguments.model))
    counts = _counts(arguments, topology)
    if arguments.rate is None:
        accelerator = "" if known is None else known.accelerator
        published = rate_of(accelerator, arguments.model, arguments.batch_per_rank)
        rate, source = published.samples_per_s, published.source
    else:
        rate, source = arguments.rate, "--rate"
    steps = [
        step_of(profile_of(units, arguments.batch_per_rank, rate, count), part_of(topology, count)) for count in counts
    ]
    if arguments.json:
        show(json.dumps(_described(arguments, rate, source, known, steps), indent=1))
        return 0
    show(f"{topology if known is None else known.title}: {arguments.model}, {arguments.batch_per_rank} samples a rank")
    _table([_HEAD, *map(_cells, steps)])
    show(f"One rank alone: {rate:g} samples/s ({source}). Forward is assumed to be a third of a step's compute.")
    if known is not None and known.usd_per_host_hour is not None:
        last = steps[-1]
        usd = last.hosts * known.usd_per_host_hour / 3600 / last.samples_per_s * 1e6
        show(f"{last.ranks} ranks cost {usd:.4g} USD for a million samples, at the price of {known.priced}.")
    return 0


def _cluster(words: str) -> tuple[Preset | None, Topology]:
    """Return the preset, if there is one with this name, and the topology."""
    if words in preset_names() or not Path(words).exists():
        known = preset(words)
        return known, known.topology
    return None, read_topology(words)


def _counts(arguments: argparse.Namespace, topology: Topology) -> list[int]:
    if arguments.sweep:
        if arguments.ranks is not None:
            raise ArgumentError(f"--sweep and --ranks {arguments.ranks} both say how many ranks: leave out one of them")
        return [*(1 << bits for bits in range((topology.ranks - 1).bit_length())), topology.ranks]
    if arguments.ranks is None:
        return [topology.ranks]
    words = arguments.ranks.split(",")
    if not all(word.isascii() and word.isdigit() for word in words):
        raise ArgumentError(f"--ranks {arguments.ranks}: want numbers of ranks, like 6,384,27360")
    return list(map(int, words))


def _cells(step: SimulatedStep) -> tuple[str, ...]:
    return (
        f"{step.ranks}",
        f"{step.hosts}",
        f"{step.seconds.total * 1e3:.4g}",
        f"{step.samples_per_s:,.0f}",
        f"{step.efficiency:.1%}",
        f"{step.communication_s * 1e3:.4g}",
        f"{step.seconds.exchange * 1e3:.4g}",
        step.bound,
    )


def _table(rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    show("\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows))


def _described(
    arguments: argparse.Namespace, rate: float, source: str, known: Preset | None, steps: Sequence[SimulatedStep]
) -> dict[str, object]:
    """Return the JSON object: times in seconds."""
    return {
        "topology": arguments.topology,
        "model": arguments.model,
        "batch_per_rank": arguments.batch_per_rank,
        "samples_per_s_of_one_rank": rate,
        "source_of_rate": source,
        "sources_of_topology": {} if known is None else dict(known.sources),
        "steps": [
            {
                "ranks": step.ranks,
                "hosts": step.hosts,
                "step_s": step.seconds.total,
                "compute_s": step.seconds.compute,
                "exposed_s": step.seconds.exchange,
                "communication_s": step.communication_s,
                "samples_per_s": step.samples_per_s,
                "efficiency": step.efficiency,
                "bound": step.bound,
            }
            for step in steps
        ],
    }
