"""Charts of a page as SVG: a value over numbers of ranks, with an interval."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _HEIGHT = 440, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 80, 14, 12, 34
_MOST_LABELS = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """A curve over numbers of ranks.

    `points` are (ranks, value), and `band` (ranks, low, high). `ideal` is a second curve to compare with. `is_log` puts
    the values on a logarithmic scale; otherwise the scale ends at 1, which is 100 %. The text of a value is `told`.
    """

    title: str
    points: Sequence[tuple[int, float]]
    band: Sequence[tuple[int, float, float]]
    told: Callable[[float], str]
    ideal: Sequence[tuple[int, float]] = ()
    is_log: bool = False


def svg_of(chart: Chart) -> str:
    """Return the chart as an SVG element that is as wide as its place."""
    values = [value for _, value in (*chart.points, *chart.ideal)]
    values += [end for _, low, high in chart.band for end in (low, high)]
    ticks = _decades(values) if chart.is_log else _tenths(values)
    across = _across([ranks for ranks, _ in chart.points])
    scaled: Callable[[float], float] = math.log10 if chart.is_log else float
    low, high = scaled(ticks[0]), scaled(ticks[-1])

    def up(value: float) -> float:
        return _HEIGHT - _BOTTOM - (scaled(value) - low) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)

    parts = [_tick(up(tick), tick, chart.told(tick)) for tick in ticks]
    ranks = [each for each, _ in chart.points]
    labelled = {round(each * (len(ranks) - 1) / (_MOST_LABELS - 1)) for each in range(_MOST_LABELS)}
    parts += [
        f'<text x="{across(ranks[at]):.2f}" y="{_HEIGHT - 18}" text-anchor="middle">{ranks[at]}</text>'
        for at in sorted(labelled)
    ]
    parts.append(f'<text x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 3}" text-anchor="end">ranks</text>')
    if chart.band:
        there = [f"{across(at):.2f},{up(high):.2f}" for at, _, high in chart.band]
        back = [f"{across(at):.2f},{up(low):.2f}" for at, low, _ in reversed(chart.band)]
        parts.append(f'<polygon class="band" points="{" ".join([*there, *back])}"/>')
    for name, curve in (("ideal", chart.ideal), ("curve", chart.points)):
        if curve:
            line = " ".join(f"{across(at):.2f},{up(value):.2f}" for at, value in curve)
            parts.append(f'<polyline class="{name}" points="{line}"/>')
    for at, value in chart.points:
        said = f"<title>{at} ranks: {escape(chart.told(value))}</title>"
        parts.append(f'<circle cx="{across(at):.2f}" cy="{up(value):.2f}" r="3">{said}</circle>')
    label = escape(chart.title, quote=True)
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}">{"".join(parts)}</svg>'


def _tick(y: float, value: float, text: str) -> str:
    line = f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.2f}" y2="{y:.2f}" data-tick="{value!r}"/>'
    return f'{line}<text x="{_LEFT - 6}" y="{y + 4:.2f}" text-anchor="end">{escape(text)}</text>'


def _across(ranks: Sequence[int]) -> Callable[[int], float]:
    """Return the place of a number of ranks from the left, on a logarithmic scale."""
    low, high = math.log2(min(ranks)), math.log2(max(ranks))
    if low == high:
        return lambda _: (_LEFT + _WIDTH - _RIGHT) / 2
    return lambda each: _LEFT + (math.log2(each) - low) / (high - low) * (_WIDTH - _LEFT - _RIGHT)


def _decades(values: Sequence[float]) -> list[float]:
    first, last = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    return [10.0**exponent for exponent in range(first, max(last, first + 1) + 1)]


def _tenths(values: Sequence[float]) -> list[float]:
    first = min(9, max(0, math.floor(10 * min(values))))
    step = 1 if first > 4 else 2
    return [each / 10 for each in range(10 - (10 - first + step - 1) // step * step, 11, step)]
