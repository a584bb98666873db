"""What `multiring simulate` predicts from: a known model with the rate of one rank, or profiles of a script."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from multiring._cli.file_option import read_option
from multiring._cli.simulated_input import feeding_of, input_remark
from multiring._runtime.rails.topology_file import read_topology
from multiring._simulator.intervals import PUBLISHED_RUNS, step_interval
from multiring._simulator.layers import layers_of, units_of
from multiring._simulator.presets import Preset, preset, preset_names
from multiring._simulator.rates import rate_of
from multiring._simulator.script_profile import ScriptProfile, script_profile_of, step_profile_of
from multiring._simulator.step import SimulatedStep, profile_of
from multiring._simulator.sweep import ProfileOf
from multiring._topology import Topology
from multiring.errors import ArgumentError
from multiring.planner.parallelism import Feeding, GradientExchange


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """A training whose steps are predicted.

    `profile` returns its profile for some ranks, samples of a rank, and a way to average gradients. `exchange` is the
    script's own way, or the default. `remarks` say where its numbers come from, and `described` is for JSON. Steps of a
    known model have an interval (`has_interval`); no runs of profiled scripts are recorded to take one from. `feeding`
    says how samples are made; None: that is unknown, and input is not priced.
    """

    title: str
    batch_per_rank: int
    exchange: GradientExchange
    profile: ProfileOf
    remarks: list[str]
    described: dict[str, Any]
    has_interval: bool = False
    feeding: Feeding | None = None

    def interval(self, step: SimulatedStep) -> tuple[float, float] | None:
        """Return the 90 % interval of a predicted step in seconds; None: not known, as for a step bound by input."""
        is_known = self.has_interval and not step.seconds.input
        return step_interval(step.seconds.total, step.ranks) if is_known else None


def subject_of(arguments: argparse.Namespace, known: Preset | None, batches: Sequence[int] = ()) -> Subject:
    """Return what the options name.

    Args:
        arguments: the options.
        known: the preset of the cluster, if it is one.
        batches: the samples of a rank that are swept; empty: those of the options.

    Raises:
        ArgumentError: the options contradict each other, or a profile cannot be read.
    """
    if not batches and arguments.batch_per_rank is not None:
        batches = [arguments.batch_per_rank]
    if arguments.profile:
        for option in ("--model", "--rate"):
            if getattr(arguments, option[2:]) is not None:
                raise ArgumentError(f"--profile has the script's own times: leave out {option}")
        profiles = [read_profile(path) for path in arguments.profile]
        return _of_script(profiles, batches, feeding_of(arguments, profiles))
    if arguments.model is None or not batches:
        raise ArgumentError(
            f"{'--batch-per-rank' if arguments.model else '--model'} is missing: want --topology with --model and "
            "--batch-per-rank, or with --profile FILE; or --published FILE"
        )
    return _of_model(arguments.model, arguments.rate, _accelerator(known), batches, feeding_of(arguments))


def _accelerator(known: Preset | None) -> str:
    return "" if known is None else known.accelerator


def _of_model(
    model: str, rate: float | None, accelerator: str, batches: Sequence[int], feeding: Feeding | None
) -> Subject:
    units = units_of(layers_of(model))
    alone = {
        batch: (rate, "--rate") if rate is not None else _published(accelerator, model, batch) for batch in batches
    }
    several = len(set(alone.values())) > 1
    told = (
        f"{each:g} samples/s{f' with {batch} samples' if several else ''} ({source})"
        for batch, (each, source) in alone.items()
    )
    first_rate, source = alone[batches[0]]
    return Subject(
        title=f"{model}, {_told(batches)} samples a rank",
        batch_per_rank=batches[0],
        exchange=GradientExchange(),
        profile=lambda ranks, samples, exchange: replace(
            profile_of(units, samples, alone[samples][0], ranks, exchange), feeding=feeding
        ),
        remarks=[
            f"One rank alone: {', '.join(dict.fromkeys(told))}. Forward is assumed to be a third of a step's compute.",
            input_remark(feeding),
            f"90 %: {PUBLISHED_RUNS} published runs of ResNet-50 on V100 were so far from their predictions.",
        ],
        has_interval=True,
        feeding=feeding,
        described={"model": model, "samples_per_s_of_one_rank": first_rate, "source_of_rate": source},
    )


def _published(accelerator: str, model: str, batch: int) -> tuple[float, str]:
    found = rate_of(accelerator, model, batch)
    return found.samples_per_s, found.source


def read_profile(path: Path) -> ScriptProfile:
    """Return the profile in the file `path`.

    Raises:
        ArgumentError: the file cannot be read, or is no profile; the error names its line and field.
    """
    return read_option("--profile", path, script_profile_of, "multiring profile")


def _of_script(profiles: list[ScriptProfile], batches: Sequence[int], feeding: Feeding | None) -> Subject:
    first = profiles[0]
    if not batches and len(profiles) > 1:
        raise ArgumentError(f"{len(profiles)} profiles with different batches: say --batch-per-rank")
    batches = batches or [first.samples]
    measured = ", ".join(f"{each.samples}" for each in profiles)
    peak_bytes = max(each.peak_memory_bytes for each in profiles)
    remark = (
        f"Measured on one rank ({first.form}, {first.precision}, {first.threads} threads) with {measured} samples a "
        f"step. Peak memory of a rank: {peak_bytes / (1 << 20):.0f} MiB."
    )
    return Subject(
        title=f"{first.model} of {first.script}, {_told(batches)} samples a rank",
        batch_per_rank=batches[0],
        exchange=first.exchange,
        profile=lambda ranks, samples, exchange: step_profile_of(profiles, ranks, samples, exchange, feeding),
        feeding=feeding,
        remarks=[
            remark,
            input_remark(feeding),
            "No 90 % interval: too few runs of profiled scripts are recorded to take one from.",
        ],
        described={
            "script": first.script,
            "form": first.form,
            "model": first.model,
            "precision": first.precision,
            "samples_measured": [each.samples for each in profiles],
            "peak_memory_bytes": peak_bytes,
        },
    )


def _told(numbers: Sequence[int]) -> str:
    return f"{numbers[0]}" if len(numbers) == 1 else f"{min(numbers)} to {max(numbers)}"


def cluster_of(words: str) -> tuple[Preset | None, Topology]:
    """Return the preset, if there is one with this name, and the topology.

    Raises:
        ArgumentError: there is no such preset or file, the file is wrong, or it describes links alone.
    """
    if words in preset_names() or not Path(words).exists():
        known = preset(words)
        return known, known.topology
    topology = read_topology(words)
    if not topology.names:
        raise ArgumentError(
            f"--topology {words} names no hosts, so the size of the cluster is unknown: add [[hosts]], each with its "
            "name and slots"
        )
    return None, topology
