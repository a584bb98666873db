"""Plot comparisons: bytes per second over size, one line with an interval per library."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from multiring._bench.cases import size_text
from multiring._bench.compare import Comparison, Timing
from multiring._replacing import replace_file, require_replaceable
from multiring.errors import ArgumentError, UnsupportedError

_INSTALL = "pip install matplotlib"
_RATE = "GB/s (size / time of a call)"
FORMATS = (".png", ".svg", ".pdf")
_WRITER, _WHAT = "multiring bench", "a figure of a bench"  # _WRITER marks our own figures


def check_plot(path: Path) -> None:
    """Raise an error unless `plot` can write to `path`; call it before a measurement.

    Raises:
        ArgumentError: the format is unknown, the folder does not exist, or the file is not a figure of multiring.
        UnsupportedError: matplotlib is missing; the message has the command that installs it.
    """
    if path.suffix not in FORMATS:
        raise ArgumentError(f"cannot plot to {path}, want a name that ends with one of {', '.join(FORMATS)}")
    if not path.absolute().parent.is_dir():
        raise ArgumentError(f"cannot plot to {path}: there is no folder {path.absolute().parent}")
    try:
        require_replaceable(path, is_ours=_is_figure, what=_WHAT)
    except OSError as error:
        raise ArgumentError(f"cannot write {path}: {error.strerror}") from None
    _figure_class()


def _is_figure(data: bytes) -> bool:
    return data.startswith((b"\x89PNG", b"%PDF", b"<?xml")) and _WRITER.encode() in data


def plot(comparisons: Sequence[Comparison], path: Path) -> None:
    """Write the figure: lines over sizes, dashed for pools and grey for the bound.

    If there is only one size, the figure has bars.

    Raises:
        ArgumentError: `path` cannot be written.
        UnsupportedError: matplotlib is missing; the message has the command that installs it.
    """
    figure = _figure_class()(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    question = comparisons[0].question
    where = f"{question.ranks} ranks on {question.hosts} host" + ("s" if question.hosts > 1 else "")
    what = f"{question.collective} {question.dtype}"
    if len({comparison.question.size_bytes for comparison in comparisons}) == 1:
        what += f", {size_text(question.size_bytes)}"
        _bars(axes, comparisons)
    else:
        for pool in sorted({comparison.pool_bytes for comparison in comparisons}):
            taken = [comparison for comparison in comparisons if comparison.pool_bytes == pool]
            _lines(axes, taken, _pool_text(pool), "--" if pool else "-")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("bytes of one rank's buffer")
        axes.set_ylabel(_RATE)
        axes.grid(visible=True, which="both", alpha=0.2)
        axes.legend(fontsize="small")
    axes.set_title(f"{what}, {where}")
    drawn = io.BytesIO()
    key = "Software" if path.suffix == ".png" else "Creator"
    figure.savefig(drawn, format=path.suffix[1:], metadata={key: _WRITER})
    try:
        replace_file(path, drawn.getvalue(), is_ours=_is_figure, what=_WHAT)
    except OSError as error:
        raise ArgumentError(f"cannot write {path}: {error.strerror}") from None


def _pool_text(pool: int) -> str:
    return f", rotating over {size_text(pool)}" if pool else ""


def _bars(axes: Any, comparisons: Sequence[Comparison]) -> None:
    """Draw each library's rate as a bar with its interval, and the bound as a bar without an interval."""
    bars: list[tuple[str, float, tuple[float, float], str]] = []
    for comparison in comparisons:
        size, label = comparison.question.size_bytes, _pool_text(comparison.pool_bytes)
        for at, timing in enumerate(comparison.timings):
            if timing.seconds:
                middle = _rate(size, timing.median_s)
                low, high = _rate(size, timing.interval.high), _rate(size, timing.interval.low)
                bars.append((_name(timing) + label, middle, (max(middle - low, 0), max(high - middle, 0)), f"C{at}"))
        if comparison.bound is not None:
            bars.append((f"bound{label}", comparison.bound.bytes_per_s / 1e9, (0, 0), "lightgrey"))
    names, rates, spreads, colors = zip(*bars, strict=True)
    drawn = axes.barh(range(len(bars)), rates, xerr=list(zip(*spreads, strict=True)), color=colors, capsize=3)
    axes.bar_label(drawn, [f"{rate:.3g}" for rate in rates], padding=4, fontsize="small")
    axes.set_yticks(range(len(bars)), names)
    axes.invert_yaxis()  # multiring first, as in the tables
    axes.margins(x=0.12)
    axes.set_xlabel(_RATE)


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
        from matplotlib.figure import Figure  # noqa: PLC0415 -- imported only to plot
    except ImportError:
        raise UnsupportedError(f"--plot needs matplotlib, which is not installed: {_INSTALL}") from None
    return Figure
