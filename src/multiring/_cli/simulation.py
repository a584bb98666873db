"""What `multiring simulate` predicts from: a known model with the rate of one rank, or profiles of a script."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from multiring._runtime.rails.topology_file import read_topology
from multiring._simulator.layers import layers_of, units_of
from multiring._simulator.presets import Preset, preset, preset_names
from multiring._simulator.rates import rate_of
from multiring._simulator.script_profile import ScriptProfile, script_profile_of, step_profile_of
from multiring._simulator.step import profile_of
from multiring._topology import Topology
from multiring.errors import ArgumentError
from multiring.planner.parallelism import GradientExchange, Profile


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """A training whose steps are predicted.

    `profile` returns its profile for some ranks, samples of a rank, and a way to average gradients; None: the script's
    own, or the default. `remarks` say where its numbers come from, and `described` is for JSON.
    """

    title: str
    batch_per_rank: int
    profile: Callable[[int, int, GradientExchange | None], Profile]
    remarks: list[str]
    described: dict[str, Any]


def subject_of(arguments: argparse.Namespace, known: Preset | None) -> Subject:
    """Return what the options name.

    Raises:
        ArgumentError: the options contradict each other, or a profile cannot be read.
    """
    if arguments.profile:
        for option in ("--model", "--rate"):
            if getattr(arguments, option[2:]) is not None:
                raise ArgumentError(f"--profile has the script's own times: leave out {option}")
        return _of_script([read_profile(path) for path in arguments.profile], arguments.batch_per_rank)
    for option in ("--model", "--batch-per-rank"):
        if getattr(arguments, option[2:].replace("-", "_")) is None:
            raise ArgumentError(
                f"{option} is missing: want --topology with --model and --batch-per-rank, or with --profile FILE; or "
                "--published FILE"
            )
    units, batch = units_of(layers_of(arguments.model)), arguments.batch_per_rank
    if arguments.rate is None:
        accelerator = "" if known is None else known.accelerator
        published = rate_of(accelerator, arguments.model, batch)
        rate, source = published.samples_per_s, published.source
    else:
        rate, source = arguments.rate, "--rate"
    return Subject(
        title=f"{arguments.model}, {batch} samples a rank",
        batch_per_rank=batch,
        profile=lambda ranks, samples, exchange: profile_of(units, samples, rate, ranks, exchange),
        remarks=[
            f"One rank alone: {rate:g} samples/s ({source}). Forward is assumed to be a third of a step's compute."
        ],
        described={"model": arguments.model, "samples_per_s_of_one_rank": rate, "source_of_rate": source},
    )


def read_profile(path: Path) -> ScriptProfile:
    """Return the profile in the file `path`.

    Raises:
        ArgumentError: the file cannot be read, or is no profile; the error names its line and field.
    """
    try:
        return script_profile_of(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"--profile {path}: {error}; want a file of multiring profile") from None
    except ArgumentError as error:
        raise ArgumentError(f"--profile {path}: {error}") from None


def _of_script(profiles: list[ScriptProfile], batch_per_rank: int | None) -> Subject:
    first = profiles[0]
    if batch_per_rank is None and len(profiles) > 1:
        raise ArgumentError(f"{len(profiles)} profiles with different batches: say --batch-per-rank")
    batch = first.samples if batch_per_rank is None else batch_per_rank
    batches = ", ".join(f"{each.samples}" for each in profiles)
    peak_bytes = max(each.peak_memory_bytes for each in profiles)
    remark = (
        f"Measured on one rank ({first.form}, {first.precision}, {first.threads} threads) with {batches} samples a "
        f"step. Peak memory of a rank: {peak_bytes / (1 << 20):.0f} MiB."
    )
    return Subject(
        title=f"{first.model} of {first.script}, {batch} samples a rank",
        batch_per_rank=batch,
        profile=lambda ranks, samples, exchange: step_profile_of(profiles, ranks, samples, exchange),
        remarks=[remark],
        described={
            "script": first.script,
            "form": first.form,
            "model": first.model,
            "precision": first.precision,
            "samples_measured": [each.samples for each in profiles],
            "peak_memory_bytes": peak_bytes,
        },
    )


def cluster_of(words: str) -> tuple[Preset | None, Topology]:
    """Return the preset, if there is one with this name, and the topology."""
    if words in preset_names() or not Path(words).exists():
        known = preset(words)
        return known, known.topology
    return None, read_topology(words)
