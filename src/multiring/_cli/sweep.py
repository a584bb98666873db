"""multiring simulate --sweep: predict the steps of all combinations of some settings, and name the best."""

import argparse
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from multiring._cli.data import size_of
from multiring._cli.number_option import AMOUNT
from multiring._cli.output import counted, show, show_table
from multiring._cli.simulation import Subject, subject_of
from multiring._schedule import Wire, names_of, wire_of
from multiring._simulator.presets import Preset
from multiring._simulator.sweep import SweepAxes, SweepPoint, exchanges_of, sweep
from multiring._topology import Topology
from multiring.convergence import Law
from multiring.errors import ArgumentError
from multiring.lab.plan import parse_paper_rate

_NAMES = ("ranks", "batch", "wire", "lag", "bucket", "nic", "workers")
_MOST = 100_000  # points: more would take an hour, and nobody would read them
_HEAD = (
    "ranks",
    "batch",
    "wire",
    "lag",
    "bucket MiB",
    "nic",
    "workers",
    "step ms",
    "samples/s",
    "efficiency",
    "exposed ms",
)
_HOURS = 3600
_MIB = 1 << 20
_MEGABIT = 125_000  # bytes
_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True)
class _Costed:
    """A point with what it takes to the accuracy.

    `hours` is the time to the accuracy; without `--least-samples`, it is in units of the shortest. None: the law does
    not say. `usd_per_million` is the price of a million samples, and `usd` that of the accuracy.
    """

    point: SweepPoint
    hours: float | None
    usd_per_million: float | None
    usd: float | None


def add_sweep_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of a sweep."""
    parser.add_argument(
        "--sweep",
        action="append",
        metavar="NAME=V,...",
        help=f"predict each combination of values, and name the best; NAME is {', '.join(_NAMES[:-1])} or {_NAMES[-1]}",
    )
    parser.add_argument(
        "--noise-scale",
        type=AMOUNT,
        metavar="B",
        help="with --sweep: the measured noise scale (critical batch) in samples, for the time to an accuracy",
    )
    parser.add_argument(
        "--least-samples",
        type=AMOUNT,
        metavar="E",
        help="with --noise-scale: the samples to the accuracy with a small batch; without it, times are relative",
    )


def show_sweep(arguments: argparse.Namespace, known: Preset | None, topology: Topology) -> int:
    """Print the steps of all points and the best of them, and return 0."""
    words = _words_of(arguments.sweep)
    for name, option in (("ranks", "--ranks"), ("batch", "--batch-per-rank"), ("workers", "--workers")):
        if name in words and getattr(arguments, option[2:].replace("-", "_")) is not None:
            raise ArgumentError(f"--sweep {name}= and {option} both say the same: leave out one of them")
    batches = _values(words, "batch", _whole)
    subject = subject_of(arguments, known, batches)
    workers = _values(words, "workers", _whole)
    if workers and subject.feeding is None:
        raise ArgumentError(
            f"--sweep workers={words['workers']}: nothing says what a worker takes for a sample; want --input FILE"
        )
    axes = SweepAxes(
        ranks=rank_counts(
            arguments.ranks or words.get("ranks"), topology, "--ranks " if arguments.ranks else "--sweep ranks="
        ),
        batches=batches or [subject.batch_per_rank],
        exchanges=exchanges_of(
            subject.exchange,
            _values(words, "wire", lambda word: Wire.NONE if word == "none" else wire_of(word)),
            _values(words, "lag", _lag),
            _values(words, "bucket", size_of),
        ),
        nics=_values(words, "nic", lambda text: parse_paper_rate(text) / 8) or [None],
        workers=workers or [None],
    )
    count = math.prod(map(len, (axes.ranks, axes.batches, axes.exchanges, axes.nics, axes.workers)))
    if count > _MOST:
        raise ArgumentError(f"--sweep: {count} combinations: want at most {_MOST}")
    law = _law_of(arguments)
    found = _costed(
        list(sweep(axes, subject.profile, topology)), law, known, is_absolute=arguments.least_samples is not None
    )
    if arguments.json:
        show(json.dumps(_described(arguments, subject, known, found), indent=1))
        return 0
    show(f"{topology if known is None else known.title}: {subject.title}")
    more = [] if law is None else ["hours" if arguments.least_samples is not None else "relative time"]
    show_table([(*_HEAD, *more), *(_cells(each, has_law=law is not None) for each in found)])
    for what, each in _best(found, is_relative=arguments.least_samples is None).items():
        show(f"{what}: {_named(each.point)}")
    for remark in subject.remarks:
        show(remark)
    if law is not None and not all(each.point.is_exact for each in found):
        show("The law of large batches says nothing about a lag or a lossy wire: such points have no time to it.")
    return 0


def rank_counts(words: str | None, topology: Topology, option: str) -> list[int]:
    """Return the numbers of ranks in `words`; None: all, and "powers": 1, 2, 4, ... up to all.

    Raises:
        ArgumentError: a word is no number of ranks.
    """
    if words is None:
        return [topology.ranks]
    if words == "powers":
        return [*(1 << bits for bits in range((topology.ranks - 1).bit_length())), topology.ranks]
    found = words.split(",")
    if not all(word.isascii() and word.isdigit() and int(word) for word in found):
        raise ArgumentError(f"{option}{words}: want numbers of ranks, like 6,384,27360, or powers")
    return _distinct([int(word) for word in found], f"{option}{words}")


def _words_of(options: Sequence[str]) -> dict[str, str]:
    """Return the values of each name, as words."""
    found: dict[str, str] = {}
    for option in options:
        name, is_set, values = option.partition("=")
        if name not in _NAMES or not is_set or not values:
            raise ArgumentError(f"--sweep {option}: want NAME=V1,V2,... with a NAME of {', '.join(_NAMES)}")
        if name in found:
            raise ArgumentError(f"--sweep {name}= is given twice: want all values in one list, like {name}=V1,V2")
        found[name] = values
    return found


def _values(words: dict[str, str], name: str, parse: Callable[[str], _Value]) -> list[_Value]:
    """Return the parsed values of a name; an empty list if it is not swept."""
    if name not in words:
        return []
    option, found = f"--sweep {name}={words[name]}", []
    for word in words[name].split(","):
        try:
            found.append(parse(word))
        except (ArgumentError, argparse.ArgumentTypeError) as error:
            raise ArgumentError(f"{option}: {error}") from None
    return _distinct(found, option)


def _distinct(found: list[_Value], option: str) -> list[_Value]:
    twice = next((each for at, each in enumerate(found) if each in found[:at]), None)
    if twice is not None:
        raise ArgumentError(f"{option}: one value is there twice: want each once")
    return found


def _whole(word: str) -> int:
    if not (word.isascii() and word.isdigit()) or int(word) < 1:
        raise ArgumentError(f"{word!r}: want a whole number, 1 or more")
    return int(word)


def _lag(word: str) -> int:
    if word not in {"0", "1"}:
        raise ArgumentError(f"{word!r}: want 0 or 1")
    return int(word)


def _law_of(arguments: argparse.Namespace) -> Law | None:
    if arguments.noise_scale is None:
        if arguments.least_samples is not None:
            raise ArgumentError("--least-samples needs --noise-scale: other batches need other numbers of samples")
        return None
    return Law(1.0 if arguments.least_samples is None else arguments.least_samples, arguments.noise_scale)


def _costed(points: Sequence[SweepPoint], law: Law | None, known: Preset | None, *, is_absolute: bool) -> list[_Costed]:
    taken = [
        law.needed(each.step.batch) / each.step.samples_per_s / _HOURS if law is not None and each.is_exact else None
        for each in points
    ]
    unit = 1.0 if is_absolute else min((each for each in taken if each is not None), default=1.0)
    hourly = None if known is None else known.usd_per_host_hour
    found = []
    for point, hours in zip(points, taken, strict=True):
        each_hour = None if hourly is None else hourly * point.step.hosts
        per_million = None if each_hour is None else each_hour / _HOURS / point.step.samples_per_s * 1e6
        usd = each_hour * hours if each_hour is not None and hours is not None and is_absolute else None
        found.append(_Costed(point, None if hours is None else hours / unit, per_million, usd))
    return found


def _best(found: Sequence[_Costed], *, is_relative: bool) -> dict[str, _Costed]:
    """Return the best point for each question; of equal points, the first."""
    best = {
        "Shortest step": min(found, key=lambda each: each.point.step.seconds.total),
        "Most samples a second": max(found, key=lambda each: each.point.step.samples_per_s),
        "Highest efficiency": max(found, key=lambda each: each.point.step.efficiency),
    }
    timed = [(each.hours, at) for at, each in enumerate(found) if each.hours is not None]
    if timed:
        hours, at = min(timed)
        best[f"Shortest time to the accuracy{'' if is_relative else f', {hours:.4g} hours'}"] = found[at]
    for what, costs in (
        ("a million samples", [(each.usd_per_million, at) for at, each in enumerate(found)]),
        ("the accuracy", [(each.usd, at) for at, each in enumerate(found)]),
    ):
        priced = [(usd, at) for usd, at in costs if usd is not None]
        if priced:
            usd, at = min(priced)
            best[f"Lowest price of {what}, {usd:.4g} USD"] = found[at]
    return best


def _named(point: SweepPoint) -> str:
    exchange = point.exchange
    nic = "" if point.nic_bytes_per_s is None else f", nic {point.nic_bytes_per_s / _MEGABIT:g} Mbit/s"
    workers = "" if point.workers is None else f", {counted(point.workers, 'worker')}"
    return (
        f"{counted(point.step.ranks, 'rank')}, batch {point.batch_per_rank}, wire {names_of([exchange.wire])}, lag "
        f"{exchange.lag}, buckets of {exchange.bucket_bytes / _MIB:g} MiB{nic}{workers}"
    )


def _cells(each: _Costed, *, has_law: bool) -> tuple[str, ...]:
    point, step, exchange = each.point, each.point.step, each.point.exchange
    told = ("-" if each.hours is None else f"{each.hours:.4g}",) if has_law else ()
    return (
        f"{step.ranks}",
        f"{point.batch_per_rank}",
        names_of([exchange.wire]),
        f"{exchange.lag}",
        f"{exchange.bucket_bytes / _MIB:g}",
        "-" if point.nic_bytes_per_s is None else f"{point.nic_bytes_per_s / _MEGABIT:g}",
        "-" if point.workers is None else f"{point.workers}",
        f"{step.seconds.total * 1e3:.4g}",
        f"{step.samples_per_s:,.0f}",
        f"{step.efficiency:.1%}",
        f"{step.seconds.exchange * 1e3:.4g}",
        *told,
    )


def _described(
    arguments: argparse.Namespace, subject: Subject, known: Preset | None, found: Sequence[_Costed]
) -> dict[str, Any]:
    """Return the JSON object: times in seconds, but hours to the accuracy."""
    is_relative = arguments.least_samples is None
    place = {id(each): at for at, each in enumerate(found)}
    best = {what.split(",")[0].lower(): place[id(each)] for what, each in _best(found, is_relative=is_relative).items()}
    return {
        "topology": arguments.topology,
        **subject.described,
        "sources_of_topology": {} if known is None else dict(known.sources),
        "best": best,
        "points": [
            _described_point(each, subject.interval(each.point.step), is_relative=is_relative) for each in found
        ],
    }


def _described_point(each: _Costed, interval: tuple[float, float] | None, *, is_relative: bool) -> dict[str, Any]:
    point, step = each.point, each.point.step
    return {
        "ranks": step.ranks,
        "hosts": step.hosts,
        "batch_per_rank": point.batch_per_rank,
        "wire": names_of([point.exchange.wire]),
        "lag": point.exchange.lag,
        "bucket_bytes": point.exchange.bucket_bytes,
        "nic_bytes_per_s": point.nic_bytes_per_s,
        "workers": point.workers,
        "step_s": step.seconds.total,
        "step_90_s": interval,
        "compute_s": step.seconds.compute,
        "waiting_s": step.seconds.waiting,
        "exposed_s": step.seconds.exchange,
        "input_wait_s": step.seconds.input,
        "communication_s": step.communication_s,
        "samples_per_s": step.samples_per_s,
        "efficiency": step.efficiency,
        "bound": step.bound,
        "relative_time_to_accuracy" if is_relative else "hours_to_accuracy": each.hours,
        "usd_per_million_samples": each.usd_per_million,
        "usd_to_accuracy": each.usd,
    }
