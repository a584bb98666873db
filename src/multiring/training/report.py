"""Write the report of a run: one self-contained HTML page, made from the run's folder.

    python -m multiring.training run

Curves are SVG with a line style each, and every figure is also in a table. So the page is readable without colours and
without pictures.
"""

import base64
import html
import io
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from multiring._replacing import replace_file
from multiring.errors import ArgumentError
from multiring.training.run_folder import METRICS, OPTIONS, PAGE, PICTURES, RESULT, read_metrics

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MOST_IN_A_TABLE = 5  # columns, so that a table fits a phone
_HEAD = "<!doctype html><html lang=en><head><meta charset=utf-8>"  # marks a report
LINES = ("-", "--", ":", "-.")
SHADES = ("0.35", "0.5", "0.65", "0.75")
UNITS = {"step": "step", "seconds": "seconds", "wall_s": "s since the start"}  # of columns that are not scores
CURVES = (
    "Scores are of the whole data set that is named. Shaded areas and bars: their 95 % intervals. Dotted grey lines: "
    "chance, and methods without a network, if they were measured."
)
INTERVALS = (
    "The intervals are over the samples of the data set. They do not say how much the result of another seed would "
    "differ."
)
STYLE = """
:root { color-scheme: light; --ink: #1c2733; --soft: #5b6875; --rule: #d5dce3; --fill: #f5f7f9; }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 68rem; padding: 1.5rem 1rem 4rem; color: var(--ink); }
body { font: 1rem/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; line-height: 1.2; margin: 0 0 .25rem; } h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem; }
p { margin: .4rem 0; } .soft { color: var(--soft); }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(9rem, 1fr)); gap: .75rem; margin: 1.2rem 0; }
.figure { background: var(--fill); border: 1px solid var(--rule); border-radius: .4rem; padding: .6rem .8rem; }
.figure b { display: block; font-size: 1.35rem; line-height: 1.3; }
.figure small { display: block; color: var(--soft); }
.curves { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr)); gap: 1rem; }
.curves svg, img { width: 100%; height: auto; display: block; }
.pictures { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 20rem), 1fr)); gap: 1rem; }
figure { margin: 0; } figcaption { color: var(--soft); font-size: .9rem; margin-top: .25rem; }
table { border-collapse: collapse; font-size: .92rem; max-width: 100%; margin: .4rem 0; }
th, td { padding: .25rem .5rem; border-bottom: 1px solid var(--rule); text-align: right; vertical-align: top; }
.numbers td { white-space: nowrap; } .named td { overflow-wrap: anywhere; }
th:first-child, td:first-child { text-align: left; overflow-wrap: normal; }
thead th { color: var(--soft); font-weight: 600; } .named td:last-child { text-align: left; }
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedRun:
    """The contents of a run's folder."""

    options: dict[str, Any]
    steps: list[dict[str, Any]]  # the log of training, by step
    evaluations: list[dict[str, Any]]
    result: dict[str, Any]
    pictures: list[tuple[str, bytes]]  # caption, PNG

    @property
    def loss_unit(self) -> str:
        """The unit of a sample's loss."""
        unit: str = self.result.get("loss_unit", "nats")
        return unit


def read(folder: Path) -> RecordedRun:
    """Read a run's folder.

    Raises:
        ArgumentError: the folder holds no run.
    """
    if not (folder / METRICS).exists() or not (folder / OPTIONS).exists():
        raise ArgumentError(f"{folder} has no {METRICS} and {OPTIONS}: want the folder of a run")
    lines = read_metrics(folder / METRICS)
    result = folder / RESULT
    return RecordedRun(
        options=tomllib.loads((folder / OPTIONS).read_text(encoding="utf-8")),
        steps=[line for line in lines if line["kind"] == "step"],
        evaluations=[line for line in lines if line["kind"] == "evaluation"],
        result=json.loads(result.read_text(encoding="utf-8")) if result.exists() else {},
        pictures=[(path.stem, path.read_bytes()) for path in sorted((folder / PICTURES).glob("*.png"))],
    )


def page(run: RecordedRun) -> str:
    """Return the report as HTML."""
    title = f"{run.result.get('program', 'Training')}: {run.result.get('model', '')}".rstrip(": ")
    parts = [
        f"<h1>{_text(title)}</h1>",
        f"<p class=soft>{_text(run.result.get('about', ''))}</p>",
        _figures(run.result.get("headline", {}), run.result.get("intervals", {})),
        "<h2>Curves</h2>",
        f"<p class=soft>{_text(CURVES)}</p>",
        f"<div class=curves>{''.join(_curves(run))}</div>",
    ]
    if run.result.get("classes"):
        parts += ["<h2>By class</h2>", _table(["class", *run.result["classes"][0][1]], _class_rows(run))]
    if run.result.get("confusion"):
        parts += ["<h2>Confusion</h2>", _confusion(run.result["confusion"])]
    if run.pictures:
        parts += ["<h2>Pictures</h2>", f"<div class=pictures>{''.join(map(_picture, run.pictures))}</div>"]
    for heading, key in (
        ("A step", "step"),
        ("What bounded it", "balance"),
        ("Batch size", "advice"),
        ("Peak", "peak"),
    ):
        if run.result.get(key):
            parts += [f"<h2>{heading}</h2>", _said(run.result[key])]
    if run.evaluations:
        parts += ["<h2>Evaluations</h2>", *_evaluations(run)]
    if run.result.get("circumstances"):
        parts += ["<h2>How it was made</h2>", _named(run.result["circumstances"])]
    parts += ["<h2>Options</h2>", _named(run.options)]
    head = (
        "<meta name=viewport content='width=device-width, initial-scale=1'>"
        f"<title>{_text(title)}</title><style>{STYLE}</style>"
        "<link rel=icon href='data:,'>"  # otherwise a browser asks the server for an icon
    )
    return f"{_HEAD}{head}</head><body>{''.join(parts)}</body></html>"


def write(folder: Path) -> Path:
    """Write the report of a run into its folder; return its path. `write_report` says more."""
    path = folder / PAGE
    data = page(read(folder)).encode()
    replace_file(path, data, is_ours=lambda found: found.startswith(_HEAD.encode()), what="the report of a run")
    return path


def _text(value: object) -> str:
    return html.escape(str(value))


def _number(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _figures(named: dict[str, object], intervals: dict[str, list[float]]) -> str:
    boxes = []
    for name, value in named.items():
        low_high = intervals.get(name)
        beside = f"<small>95 % interval: {low_high[0]:.1f} to {low_high[1]:.1f}</small>" if low_high else ""
        boxes.append(f"<div class=figure><b>{_text(_number(value))}</b>{_text(name)}{beside}</div>")
    said = f"<p class=soft>{_text(INTERVALS)}</p>" if intervals else ""
    return f"<div class=figures>{''.join(boxes)}</div>{said}"


def _named(values: dict[str, Any]) -> str:
    """Return a table of names and values, as text."""
    return _table(["", ""], [[name, str(value)] for name, value in values.items()], kind="named")


def _evaluations(run: RecordedRun) -> list[str]:
    """Return tables of all evaluations, each with as many columns as fit a phone's screen."""
    names = [name for name in run.evaluations[-1] if name not in {"kind", "step", "intervals"}]
    tables = []
    for first in range(0, len(names), MOST_IN_A_TABLE - 1):
        shown = names[first : first + MOST_IN_A_TABLE - 1]
        rows = [[str(each["step"]), *(_number(each.get(name)) for name in shown)] for each in run.evaluations]
        tables.append(_table(["step", *(_with_unit(name, run.loss_unit) for name in shown)], rows))
    return tables


def _with_unit(name: str, loss_unit: str) -> str:
    """Return a record's name of a value, with its unit."""
    return UNITS.get(name) or f"{name}, {loss_unit if name.endswith(' loss') else '%'}"


def _said(value: object) -> str:
    """Return a dict as a table, or a list as paragraphs."""
    if isinstance(value, dict):
        return _table(["", "value"], [[name, _number(each)] for name, each in value.items()], kind="named")
    lines = value if isinstance(value, list) else [value]
    return "".join(f"<p>{_text(line)}</p>" for line in lines)


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]], kind: str = "numbers") -> str:
    head = "".join(f"<th scope=col>{_text(each)}</th>" for each in heads)
    body = "".join("<tr>" + "".join(f"<td>{_text(each)}</td>" for each in row) + "</tr>" for row in rows)
    return f"<table class={kind}><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _class_rows(run: RecordedRun) -> list[list[str]]:
    return [[name, *(_number(each) for each in values.values())] for name, values in run.result["classes"]]


def _confusion(counts: list[list[int]]) -> str:
    """Return a confusion matrix as a table, or as a picture if the table would not fit a phone's screen."""
    if len(counts) < MOST_IN_A_TABLE:
        names = [str(each) for each in range(len(counts))]
        rows = ([name, *map(str, row)] for name, row in zip(names, counts, strict=True))
        return _table(["true \\ guessed", *names], rows)
    shares = np.array(counts) / np.maximum(np.sum(counts, 1, keepdims=True), 1)
    figure = Figure((6, 5), layout="constrained")
    axes = figure.add_subplot()
    axes.set(xlabel="guessed", ylabel="true")
    figure.colorbar(axes.imshow(shares, cmap="Greys", vmin=0, vmax=1), label="share of the class")
    return f"<div class=curves>{_svg(figure, 'Confusion matrix: share of each class by guess')}</div>"


def _curves(run: RecordedRun) -> list[str]:
    """Return figures of the losses, of each data set's scores, and of the learning rate."""
    # Scores keep the task's order: the first score of a data set is the main one.
    found = dict.fromkeys(name for line in run.evaluations for name in line)
    names = [name for name in found if name not in {*UNITS, "kind", "intervals"}]
    losses = [name for name in names if name.endswith(" loss")]
    # One figure per data set (the first word of its scores) keeps the lines few, each with its own style.
    sets: dict[str, list[str]] = {}
    for name in names:
        if name not in losses:
            sets.setdefault(name.partition(" ")[0], []).append(name)
    curves = [_Curve("training", [(line["step"], line["loss"]) for line in run.steps])]
    curves += [_curve(run, name, name.removesuffix(" loss")) for name in losses]
    drawn = [_drawn(run, "loss", f"{run.loss_unit} a sample", curves)]
    for heading, keys in sorted(sets.items(), reverse=True):
        curves = [_curve(run, key, key.partition(" ")[2]) for key in keys]
        drawn.append(_drawn(run, f"scores of {heading}", "%", curves, _levels(run, keys[0])))
    rates = _Curve("", [(line["step"], line["rate"]) for line in run.steps])
    return [*drawn, _drawn(run, "learning rate", "learning rate", [rates])]


@dataclass(frozen=True, slots=True)
class _Curve:
    """One line of a figure: values by step, with intervals if there are any."""

    label: str
    points: list[tuple[int, float]]
    intervals: list[tuple[float, float]] | None = None


def _curve(run: RecordedRun, key: str, label: str) -> _Curve:
    """Return the curve of one score over all evaluations."""
    lines = [line for line in run.evaluations if key in line]
    found = [line.get("intervals", {}).get(key) for line in lines]
    intervals = [(low, high) for low, high in filter(None, found)]
    points = [(line["step"], line[key]) for line in lines]
    return _Curve(label, points, intervals if intervals and len(intervals) == len(points) else None)


def _levels(run: RecordedRun, key: str) -> dict[str, float]:
    """Return the levels to compare a score with: chance, and the measured methods without a network."""
    rows = {"chance": run.result.get("chance", {}), **run.result.get("baselines", {})}
    return {f"{key.partition(' ')[2]}, {name}": row[key] for name, row in rows.items() if key in row}


def _drawn(
    run: RecordedRun, heading: str, unit: str, curves: Sequence[_Curve], levels: Mapping[str, float] | None = None
) -> str:
    """Return a figure over steps, with a second axis for the time of the run up to each step."""
    figure = Figure((5.2, 3.6), layout="constrained")
    axes = figure.add_subplot()
    for style, curve in zip(LINES * len(curves), curves, strict=False):
        if not curve.points:
            continue
        marker = "." * (len(curve.points) < 30)
        steps, values = zip(*curve.points, strict=True)
        axes.plot(steps, values, style, color="black", label=curve.label, marker=marker)
        if curve.intervals is not None:
            low, high = zip(*curve.intervals, strict=True)
            axes.fill_between(steps, low, high, color="black", alpha=0.12, linewidth=0)
            axes.vlines(steps, low, high, color="black", alpha=0.3, linewidth=1)
    for shade, (label, value) in zip(SHADES, (levels or {}).items(), strict=False):
        axes.axhline(value, color=shade, linewidth=1.2, linestyle=(0, (1, 1)), label=f"{label} {value:.3g}")
    last = max((line["step"] for line in (*run.steps, *run.evaluations)), default=1)
    axes.set(xlabel="step", ylabel=unit, title=heading, xlim=(0, 1.03 * max(last, 1)))
    axes.grid(visible=True, color="0.9")
    _add_clock(axes, run)
    if len(axes.lines) > 1:
        figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize="small", handlelength=3)
    return _svg(figure, f"{heading} by step")


def _add_clock(axes: Axes, run: RecordedRun) -> None:
    """Add an axis of minutes since the run began, without the breaks between its processes."""
    timed = {line["step"]: line["wall_s"] / 60 for line in (*run.steps, *run.evaluations) if "wall_s" in line}
    if not timed or max(timed) == 0 or max(timed.values()) <= 0:
        return
    last = max(timed)
    # The axis ends a little after the last step; extrapolate the time there at the run's mean speed.
    timed[2 * last] = 2 * timed[last]
    steps = np.array([0, *sorted(timed)])
    minutes = np.maximum.accumulate([0.0, *(timed[step] for step in sorted(timed))]) + 1e-9 * np.arange(len(steps))
    both = (lambda at: np.interp(at, steps, minutes), lambda at: np.interp(at, minutes, steps))
    axes.secondary_xaxis("top", functions=both).set_xlabel("minutes, with evaluation and checkpoints", fontsize="small")


def _svg(figure: Figure, label: str) -> str:
    drawn = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": label, "font.family": "sans-serif"}):
        figure.savefig(drawn, format="svg", metadata={"Date": None, "Creator": None})
    svg = drawn.getvalue()
    svg = svg[svg.index("<svg") :].replace("<svg", f'<svg role="img" aria-label="{_text(label)}"', 1)
    return f"<figure>{svg}</figure>"


def _picture(named: tuple[str, bytes]) -> str:
    caption, data = named
    caption = _text(caption.split("-", 1)[-1].replace("_", " "))
    source = base64.b64encode(data).decode()
    return (
        f"<figure><img alt='{caption}' src='data:image/png;base64,{source}'><figcaption>{caption}</figcaption></figure>"
    )
