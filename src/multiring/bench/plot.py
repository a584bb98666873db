"""A figure of comparisons: bytes per second against size, each library a line with its interval."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from multiring.bench.cases import size_text
from multiring.bench.compare import Comparison, Timing
from multiring.errors import ArgumentError, UnsupportedError

_INSTALL = "pip install 'multiring[bench]'"
FORMATS = (".png", ".svg", ".pdf")


def check_plot(path: Path) -> None:
    """Raise unless `plot` could write to `path`: better before the measurement than after it.

    Raises:
        ArgumentError: no format of that name, or no such folder.
        UnsupportedError: matplotlib is missing; names the command that installs it.
    """
    if path.suffix not in FORMATS:
        raise ArgumentError(f"cannot plot to {path}, want a name that ends with one of {', '.join(FORMATS)}")
    if not path.absolute().parent.is_dir():
        raise ArgumentError(f"cannot plot to {path}: there is no folder {path.absolute().parent}")
    _figure_class()


def plot(comparisons: Sequence[Comparison], path: Path) -> None:
    """Write the figure; a pool's points are joined by a dashed line, the bound's are grey.

    Raises:
        ArgumentError: `path` cannot be written.
        UnsupportedError: matplotlib is missing; names the command that installs it.
    """
    figure = _figure_class()(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for pool in sorted({comparison.pool_bytes for comparison in comparisons}):
        taken = [comparison for comparison in comparisons if comparison.pool_bytes == pool]
        _lines(axes, taken, f", rotating over {size_text(pool)}" if pool else "", "--" if pool else "-")
    question = comparisons[0].question
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("bytes of one rank's buffer")
    axes.set_ylabel("GB/s (size / time of a call)")
    where = f"{question.ranks} ranks on {question.hosts} host" + ("s" if question.hosts > 1 else "")
    axes.set_title(f"{question.collective} {question.dtype}, {where}")
    axes.grid(visible=True, which="both", alpha=0.2)
    axes.legend(fontsize="small")
    try:
        figure.savefig(path)
    except OSError as error:
        raise ArgumentError(f"cannot write {path}: {error.strerror}") from None


def _lines(axes: Any, comparisons: Sequence[Comparison], label: str, style: str) -> None:
    for at, first in enumerate(comparisons[0].timings):
        points = [(each.question.size_bytes, each.timings[at]) for each in comparisons if each.timings[at].seconds]
        if not points:
            continue
        sizes = [size for size, _ in points]
        middle = [_rate(size, timing.median_s) for size, timing in points]
        low = [_rate(size, timing.interval.high) for size, timing in points]
        high = [_rate(size, timing.interval.low) for size, timing in points]
        (line,) = axes.plot(sizes, middle, style, marker="o", markersize=3, label=_name(first) + label, color=f"C{at}")
        axes.fill_between(sizes, low, high, alpha=0.2, color=line.get_color())
    bounds = [
        (each.question.size_bytes, each.bound.bytes_per_s / 1e9) for each in comparisons if each.bound is not None
    ]
    if bounds:
        axes.plot(*zip(*bounds, strict=True), style, color="grey", linewidth=1, label=f"bound{label}")


def _name(timing: Timing) -> str:
    return f"{timing.library} ({timing.buffers})" if timing.library == "multiring" else timing.library


def _rate(size_bytes: int, seconds: float) -> float:
    return size_bytes / seconds / 1e9


def _figure_class() -> Any:
    """Return matplotlib's Figure, which draws without pyplot's state and without a display."""
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 -- only who plots needs it
    except ImportError:
        raise UnsupportedError(f"--plot needs matplotlib, which is not installed: {_INSTALL}") from None
    return Figure
