"""The options of `multiring simulate` about input: what a worker takes for a sample, and what the hosts have for it."""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from multiring._cli.file_option import read_option
from multiring._cli.number_option import AMOUNT, RANKS
from multiring._cli.output import counted
from multiring._simulator.measured_feeding import MeasuredFeeding, measured_feeding_of
from multiring._simulator.script_profile import ScriptProfile
from multiring._simulator.step import SimulatedStep
from multiring.errors import ArgumentError
from multiring.planner.parallelism import Feeding

INPUT_OPTIONS = ("--input", "--workers", "--cores-per-host", "--source-rate", "--sample-bytes")
_MEASURE = "multiring data bench DATA --save FILE"


def add_input_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    group = parser.add_argument_group("input", "what makes the samples of each rank")
    group.add_argument(
        "--input", type=Path, metavar="FILE", help=f"what a worker takes, of {_MEASURE} (default: as in the profile)"
    )
    group.add_argument(
        "--workers", type=RANKS, metavar="N", help="workers of a rank (default: those that were measured)"
    )
    group.add_argument(
        "--cores-per-host", type=AMOUNT, metavar="N", help="cores of a host (default: each worker has one for itself)"
    )
    group.add_argument(
        "--source-rate",
        type=AMOUNT,
        metavar="B/S",
        help="bytes/s of the source to all hosts together (default: enough)",
    )
    group.add_argument(
        "--sample-bytes", type=AMOUNT, metavar="B", help="bytes of a sample in the source (default: those of --input)"
    )


def feeding_of(arguments: argparse.Namespace, profiles: Sequence[ScriptProfile] = ()) -> Feeding | None:
    """Return how samples are made, by the options and by the first profile that says it; None if nothing says it.

    Raises:
        ArgumentError: an option is wrong, or needs a measurement that is not there.
    """
    given = {option: getattr(arguments, option[2:].replace("-", "_")) for option in INPUT_OPTIONS[1:]}
    if given["--sample-bytes"] is not None and given["--source-rate"] is None:
        raise ArgumentError("--sample-bytes: want --source-rate, too; without it, the source bounds nothing")
    profiled = next((each.feeding for each in profiles if each.feeding is not None), None)
    measured = profiled if arguments.input is None else _read(arguments.input)
    if measured is None:
        without = [option for option, value in given.items() if value is not None]
        if without:
            lacking = "the profile does not say" if profiles else "nothing says"
            raise ArgumentError(
                f"{without[0]}: {lacking} what a worker takes for a sample; want --input FILE, of {_MEASURE}"
            )
        return None
    if profiled is not None and not measured.compute_cores:
        # `multiring data bench` does not train, so only the profile says what the rest of a rank needs.
        measured = replace(measured, compute_cores=profiled.compute_cores)
    if given["--source-rate"] is not None and given["--sample-bytes"] is None and not measured.sample_bytes:
        raise ArgumentError("--source-rate: want --sample-bytes, too: the profile does not have the bytes of a sample")
    return measured.feeding(
        workers=given["--workers"],
        cores=given["--cores-per-host"],
        source_bytes_per_s=given["--source-rate"],
        sample_bytes=given["--sample-bytes"],
    )


def _read(path: Path) -> MeasuredFeeding:
    return read_option("--input", path, measured_feeding_of, _MEASURE)


def input_remark(feeding: Feeding | None) -> str:
    """Return the assumptions about input as a line."""
    if feeding is None:
        return "Input is not priced: nothing says what a worker takes for a sample."
    workers = f"{counted(feeding.workers, 'worker')} a rank"
    cores = "each on a core" if feeding.cores is None else f"{feeding.cores:g} cores a host"
    if feeding.cores is not None and not feeding.compute_cores:
        cores += ", of which the rest of a rank is taken to need none"
    source = "" if feeding.source_bytes_per_s is None else f", a source of {feeding.source_bytes_per_s:.4g} bytes/s"
    return f"Input: {workers}, {cores}{source}; a worker takes {feeding.worker_s * 1e3:.4g} ms for a sample."


def described_input(step: SimulatedStep, feeding: Feeding | None) -> dict[str, Any] | None:
    """Return the input of a step for JSON; None if it is not priced. Rates are those of one rank."""
    if feeding is None or step.input is None:
        return None
    return {
        "samples_per_s_of_rank": step.batch / step.ranks / step.input.seconds,
        "seconds": step.input.seconds,
        "bound": step.input.bound,
        "workers": feeding.workers,
        "cores_per_host": feeding.cores,
    }
