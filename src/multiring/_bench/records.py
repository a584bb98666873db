"""Write a comparison as records (one JSON object per line) and as a table."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from multiring._bench.cases import size_text
from multiring._bench.compare import OURS, Comparison, Timing
from multiring._bench.machine import QUIET_CORES
from multiring._bench.statistics import Interval
from multiring._bench.step import StepTiming


@dataclass(frozen=True, kw_only=True, slots=True)
class Circumstances:
    """The facts that all records of a run have in common."""

    hardware: str
    commit: str
    command: str
    ping_pong_us: float
    network: str = ""  # the lab's network, as the user described it

    def lines(self) -> list[str]:
        """Return the facts as lines of text."""
        more = f", {self.network}" if self.network else ""
        return [
            f"command: {self.command}",
            f"commit {self.commit}, {today()}, {self.hardware}, pipe ping-pong {self.ping_pong_us:.1f} us{more}",
        ]


def today() -> str:
    """Return today's date in the format of records."""
    return time.strftime("%Y-%m-%d")


def why_not_publishable(comparison: Comparison) -> list[str]:
    """Return the reasons against publishing these figures, if there are any."""
    reasons = []
    if comparison.other_cores > QUIET_CORES:
        reasons.append(f"other work took {comparison.other_cores:.0%} of a core, more than {QUIET_CORES:.0%}")
    if not comparison.ours.interval.is_sure:
        reasons.append(f"no 95 % interval from {len(comparison.ours.seconds)} alternations, want at least 6")
    return reasons


def records_of(comparison: Comparison, circumstances: Circumstances) -> list[dict[str, Any]]:
    """Return one record per library, with figures or with the reason for missing figures.

    `ratio` is the seconds of library `against` divided by this library's seconds: above 1, this library is faster.
    `interval` is its confidence interval. Multiring is compared with the best peer, a peer with multiring. Without
    peers, `interval` is the interval of `median_s`.
    """
    question = comparison.question
    quiet = not why_not_publishable(comparison)
    made = []
    for timing in comparison.timings:
        record: dict[str, Any] = {
            "collective": question.collective,
            "op": question.op,
            "library": timing.library,
            "engine": timing.engine,
            "version": timing.version,
            "buffers": timing.buffers,
            "ranks": question.ranks,
            "hosts": question.hosts,
            "network": circumstances.network,
            "size_bytes": question.size_bytes,
            "pool_bytes": comparison.pool_bytes,
            "dtype": question.dtype,
            "device": question.device,
        }
        if timing.not_offered:
            made.append(record | {"not_offered": timing.not_offered})
            continue
        algbw = question.size_bytes / timing.median_s
        made.append(
            record
            | {
                "median_s": timing.median_s,
                "seconds": timing.seconds,
                "calls": timing.calls,
                "algbw_bytes_per_s": algbw,
                "busbw_bytes_per_s": algbw * question.bus_factor,
                "bound_bytes_per_s": None if comparison.bound is None else comparison.bound.bytes_per_s,
                "bound_formula": "" if comparison.bound is None else comparison.bound.formula,
                "verified": question.collective != "barrier",
                **_ratio(comparison, timing),
                "publishable": quiet,
                "other_cores": comparison.other_cores,
                "settings": dict(timing.settings),
                "hardware": circumstances.hardware,
                "ping_pong_us": circumstances.ping_pong_us,
                "commit": circumstances.commit,
                "date": today(),
                "command": circumstances.command,
            }
        )
    return made


def _ratio(comparison: Comparison, timing: Timing) -> dict[str, Any]:
    best = comparison.best_peer
    if timing is comparison.ours and best is None:
        own = timing.interval
        return {"against": None, "ratio": None, "interval": [own.low, own.high], "level": own.level}
    peer = best if timing is comparison.ours and best is not None else timing
    ours = comparison.advantage_over(peer)
    if ours is None:
        return {"against": None, "ratio": None, "interval": None, "level": None}
    if timing is not comparison.ours:
        ours = Interval(1 / ours.high, 1 / ours.middle, 1 / ours.low, ours.level)
    against = peer.library if timing is comparison.ours else OURS
    return {"against": against, "ratio": ours.middle, "interval": [ours.low, ours.high], "level": ours.level}


def lines_of(comparison: Comparison) -> list[str]:
    """Return the comparison as a table, followed by notes for its readers."""
    question = comparison.question
    rows: list[tuple[str, ...]] = [
        ("library", "buffers", "median", "", "GB/s", "bus", "of bound", "multiring is faster by")
    ]
    rows += [_row(comparison, timing) for timing in comparison.timings]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    where = f"{question.ranks} ranks" + (f" on {question.hosts} hosts" if question.hosts > 1 else "")
    what = f"{question.collective} {question.op}" if question.op != "sum" else question.collective
    where += f" on {question.device}" if question.device != "cpu" else ""
    used = f"rotating over {size_text(comparison.pool_bytes)} a rank" if comparison.pool_bytes else "one buffer"
    lines = [f"{what}, {size_text(question.size_bytes)} {question.dtype}, {where}, {used}"]
    for row in rows:
        cells = [text.ljust(width) for text, width in zip(row[:2], widths[:2], strict=True)]
        cells += [text.rjust(width) for text, width in zip(row[2:], widths[2:], strict=True)]
        lines.append("  " + "  ".join(cells).rstrip())
    missing = "not offered" if question.device == "cpu" else "NOT RUN"
    lines += [
        f"  {timing.library}: {missing}: {timing.not_offered}" for timing in comparison.timings if timing.not_offered
    ]
    if comparison.bound is not None:
        how = f": {comparison.bound.formula}" if comparison.bound.formula else ""
        lines.append(f"  bound {comparison.bound.bytes_per_s / 1e9:.3g} GB/s{how}")
    lines += [f"  not publishable: {reason}" for reason in why_not_publishable(comparison)]
    return lines


def _row(comparison: Comparison, timing: Timing) -> tuple[str, ...]:
    if timing.not_offered:
        return (timing.library, timing.buffers, "-", "", "-", "-", "-", "-")
    own = timing.interval
    algbw = comparison.question.size_bytes / timing.median_s / 1e9
    bound = comparison.bound
    ratio = comparison.advantage_over(timing) if timing is not comparison.ours else None
    return (
        timing.library,
        timing.buffers,
        time_text(own.middle),
        f"[{time_text(own.low)}, {time_text(own.high)}]",
        f"{algbw:.3g}",
        f"{algbw * comparison.question.bus_factor:.3g}",
        f"{algbw * 1e9 / bound.bytes_per_s:.0%}" if bound else "-",
        f"{ratio.middle:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]" if ratio else "",
    )


def time_text(seconds: float) -> str:
    """Return a time as text for tables."""
    return f"{seconds * 1e6:.2f} us" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"


def settings_lines(timings: Sequence[Timing | StepTiming]) -> list[str]:
    """Return the version and settings of each library."""
    lines = []
    for timing in timings:
        if timing.version:
            chosen = ", ".join(f"{name}={value}" for name, value in timing.settings.items())
            lines.append(f"  {timing.library}: {timing.version}" + (f"; {chosen}" if chosen else ""))
    return lines
