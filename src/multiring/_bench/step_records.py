"""Write a comparison of training steps as records (one JSON object per line) and as a table."""

from typing import Any

from multiring._bench.machine import QUIET_CORES
from multiring._bench.records import Circumstances, today
from multiring._bench.statistics import Interval
from multiring._bench.step import StepComparison, StepTiming
from multiring._bench.workers.step_case import ALONE, DDP, INDEPENDENT, NETWORKS, OURS


def why_steps_not_publishable(comparison: StepComparison) -> list[str]:
    """Return the reasons against publishing these figures, if there are any."""
    reasons = []
    if comparison.other_cores > QUIET_CORES:
        reasons.append(f"other work took {comparison.other_cores:.0%} of a core, more than {QUIET_CORES:.0%}")
    if not all(timing.interval.is_sure for timing in comparison.timings if timing.seconds):
        reasons.append(f"{comparison.manner.alternations} alternations give no 95 % interval, want at least 6")
    return reasons


def step_records(comparison: StepComparison, circumstances: Circumstances) -> list[dict[str, Any]]:
    """Return one record per library.

    `ratio`, with its `interval`, is an independent process's step divided by this library's step. `exposed_s` is their
    difference, and `exposed_share` its part of this library's step. `emulated_compute_s` is the time for which ranks
    slept, or None if they computed. `ddp_ratio` is DistributedDataParallel's step divided by this library's step.
    All are medians over alternations.
    """
    question = comparison.question
    common = {
        "ranks": question.ranks,
        "hosts": question.hosts,
        "network_between": circumstances.network,
        "threads": question.threads,
        "batch": question.samples,
        "image_size": question.image_size,
        "dtype": question.dtype,
        "device": question.device,
        "parameters": NETWORKS[question.network].parameters,
        "gradient_bytes": question.gradient_bytes,
        "emulated_compute_s": None if comparison.pace is None else comparison.pace.step_s,
    }
    ending = {
        "publishable": not why_steps_not_publishable(comparison),
        "other_cores": comparison.other_cores,
        "hardware": circumstances.hardware,
        "ping_pong_us": circumstances.ping_pong_us,
        "commit": circumstances.commit,
        "date": today(),
        "command": circumstances.command,
    }
    return [
        {"network": question.network, "library": timing.library, "version": timing.version}
        | common
        | (_figures(comparison, timing) if timing.seconds else {"not_run": timing.not_run})
        | {"verified": not timing.not_run, "steps": comparison.manner.steps, "settings": dict(timing.settings)}
        | ending
        for timing in comparison.timings
    ]


def _figures(comparison: StepComparison, timing: StepTiming) -> dict[str, Any]:
    own = timing.interval
    figures: dict[str, Any] = {"median_step_s": own.middle, "seconds": timing.seconds, "level": own.level}
    exposed, ratio = comparison.exposed_s(timing.library), comparison.ratio(timing.library, INDEPENDENT)
    ddp = comparison.ratio(timing.library, DDP)
    figures |= {"exposed_s": _middle(exposed), "exposed_interval": _ends(exposed)}
    figures |= {"exposed_share": None if ratio is None else 1 - ratio.middle}
    figures |= {"ratio": _middle(ratio), "interval": _ends(ratio)}
    return figures | {"ddp_ratio": _middle(ddp), "ddp_interval": _ends(ddp)}


def _middle(interval: Interval | None) -> float | None:
    return None if interval is None else interval.middle


def _ends(interval: Interval | None) -> list[float] | None:
    return None if interval is None else [interval.low, interval.high]


def step_lines(comparison: StepComparison) -> list[str]:
    """Return the comparison as a table, followed by notes for its readers."""
    question = comparison.question
    size = f" of {question.image_size} pixels" if question.network != "embedding" else ""
    where = f"{question.ranks} ranks" + (f" on {question.hosts} hosts" if question.hosts > 1 else "")
    where += f" on {question.device}" if question.device != "cpu" else ""
    what = f"{question.network}, {question.samples} samples{size} a rank, {question.dtype}"
    gradients = f"{question.gradient_bytes / 1e6:.1f} MB of gradients"
    lines = [f"{what}, {where} x {question.threads} threads, {gradients}"]
    if comparison.pace is not None:
        lines.append(
            f"  compute is emulated: ranks sleep for the {comparison.pace.step_s * 1e3:.1f} ms of one rank alone"
        )
    rows: list[tuple[str, ...]] = [("library", "step", "", "exposed", "", "share", "independent / it", "")]
    rows += [_row(comparison, timing) for timing in comparison.timings]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = [text.rjust(width) for text, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  " + "  ".join([row[0].ljust(widths[0]), *cells]).rstrip())
    lines += [f"  {timing.library}: NOT RUN: {timing.not_run}" for timing in comparison.timings if timing.not_run]
    longer = comparison.ratio(ALONE, OURS)
    if longer is not None:
        lines.append(f"  {OURS} / {ALONE}: {longer.middle:.3f} [{longer.low:.3f}, {longer.high:.3f}]")
    faster = comparison.ratio(OURS, DDP)
    if faster is not None:
        lines.append(f"  {DDP} / {OURS}: {faster.middle:.3f} [{faster.low:.3f}, {faster.high:.3f}]")
    return lines + [f"  not publishable: {reason}" for reason in why_steps_not_publishable(comparison)]


def _row(comparison: StepComparison, timing: StepTiming) -> tuple[str, ...]:
    if timing.not_run:
        return (timing.library, "-", "", "", "", "", "", "")
    own = timing.interval
    cells = (timing.library, f"{own.middle * 1e3:.1f} ms", f"[{own.low * 1e3:.1f}, {own.high * 1e3:.1f}]")
    exposed, ratio = comparison.exposed_s(timing.library), comparison.ratio(timing.library, INDEPENDENT)
    if timing.library == INDEPENDENT or exposed is None or ratio is None:
        return (*cells, "", "", "", "", "")
    return (
        *cells,
        f"{exposed.middle * 1e3:.1f} ms",
        f"[{exposed.low * 1e3:.1f}, {exposed.high * 1e3:.1f}]",
        f"{1 - ratio.middle:.1%}",
        f"{ratio.middle:.3f}",
        f"[{ratio.low:.3f}, {ratio.high:.3f}]",
    )
