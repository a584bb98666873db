"""The report of a run: one HTML page that needs no other file, made from what the run's folder holds.

    python -m examples.training.report run

Curves are drawn as SVG with a line style each, and every figure stands in a table besides, so that the page reads
without colour and without a picture.
"""

import argparse
import base64
import html
import io
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

METRICS, RESULT, PAGE, PICTURES = "metrics.jsonl", "result.json", "report.html", "pictures"
LINES = ("-", "--", ":", "-.")
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
.curves { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr)); gap: 1rem; }
.curves svg, img { width: 100%; height: auto; display: block; }
.pictures { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 20rem), 1fr)); gap: 1rem; }
figure { margin: 0; } figcaption { color: var(--soft); font-size: .9rem; margin-top: .25rem; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: .92rem; }
th, td { padding: .25rem .6rem; border-bottom: 1px solid var(--rule); text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } thead th { color: var(--soft); font-weight: 600; }
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """What a run's folder holds."""

    options: dict[str, Any]
    steps: list[dict[str, Any]]  # what was logged of training, by step
    evaluations: list[dict[str, Any]]
    result: dict[str, Any]
    pictures: list[tuple[str, bytes]]  # caption, PNG


def read(folder: Path) -> Run:
    """Read a run.

    Raises:
        FileNotFoundError: the folder holds none.
    """
    lines = [json.loads(line) for line in (folder / METRICS).read_text(encoding="utf-8").splitlines()]
    result = folder / RESULT
    return Run(
        options=tomllib.loads((folder / "options.toml").read_text(encoding="utf-8")),
        steps=[line for line in lines if line["kind"] == "step"],
        evaluations=[line for line in lines if line["kind"] == "evaluation"],
        result=json.loads(result.read_text(encoding="utf-8")) if result.exists() else {},
        pictures=[(path.stem, path.read_bytes()) for path in sorted((folder / PICTURES).glob("*.png"))],
    )


def page(run: Run) -> str:
    """Return the report as HTML."""
    title = f"{run.result.get('program', 'Training')}: {run.result.get('model', '')}".rstrip(": ")
    parts = [
        f"<h1>{_text(title)}</h1>",
        f"<p class=soft>{_text(run.result.get('about', ''))}</p>",
        _figures(run.result.get("headline", {})),
        "<h2>Curves</h2>",
        f"<div class=curves>{''.join(_curves(run))}</div>",
    ]
    if "classes" in run.result:
        parts += ["<h2>By class</h2>", _table(["class", *run.result["classes"][0][1]], _class_rows(run))]
    if "confusion" in run.result:
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
        names = [name for name in run.evaluations[-1] if name not in {"kind", "step"}]
        rows = [[str(each["step"]), *(_number(each.get(name)) for name in names)] for each in run.evaluations]
        parts += ["<h2>Evaluations</h2>", _table(["step", *names], rows)]
    parts += ["<h2>Options</h2>", _table(["option", "value"], [[k, str(v)] for k, v in run.options.items()])]
    head = (
        "<meta charset=utf-8><meta name=viewport content='width=device-width, initial-scale=1'>"
        f"<title>{_text(title)}</title><style>{STYLE}</style>"
        "<link rel=icon href='data:,'>"  # or a browser asks the server for one
    )
    return f"<!doctype html><html lang=en><head>{head}</head><body>{''.join(parts)}</body></html>"


def write(folder: Path) -> Path:
    """Write the report of a run into its folder; return its path."""
    path = folder / PAGE
    path.write_text(page(read(folder)), encoding="utf-8")
    return path


def _text(value: object) -> str:
    return html.escape(str(value))


def _number(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _figures(named: dict[str, object]) -> str:
    boxes = (f"<div class=figure><b>{_text(_number(value))}</b>{_text(name)}</div>" for name, value in named.items())
    return f"<div class=figures>{''.join(boxes)}</div>"


def _said(value: object) -> str:
    """Return a dict as a table, a list as paragraphs."""
    if isinstance(value, dict):
        return _table(["", "value"], [[name, _number(each)] for name, each in value.items()])
    lines = value if isinstance(value, list) else [value]
    return "".join(f"<p>{_text(line)}</p>" for line in lines)


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th scope=col>{_text(each)}</th>" for each in heads)
    body = "".join("<tr>" + "".join(f"<td>{_text(each)}</td>" for each in row) + "</tr>" for row in rows)
    return f"<div class=scroll><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


def _class_rows(run: Run) -> list[list[str]]:
    return [[name, *(_number(each) for each in values.values())] for name, values in run.result["classes"]]


def _confusion(counts: list[list[int]]) -> str:
    """Return a confusion matrix: as a table, or as a picture where it has more than a dozen classes."""
    if len(counts) <= 12:
        names = [str(each) for each in range(len(counts))]
        rows = ([name, *map(str, row)] for name, row in zip(names, counts, strict=True))
        return _table(["true \\ guessed", *names], rows)
    shares = np.array(counts) / np.maximum(np.sum(counts, 1, keepdims=True), 1)
    figure = Figure((6, 5), layout="constrained")
    axes = figure.add_subplot()
    axes.set(xlabel="guessed", ylabel="true")
    figure.colorbar(axes.imshow(shares, cmap="Greys", vmin=0, vmax=1), label="share of the class")
    return f"<div class=curves>{_svg(figure, 'Confusion matrix: share of each class by guess')}</div>"


def _curves(run: Run) -> list[str]:
    drawn = []
    names = sorted({name for line in run.evaluations for name in line} - {"kind", "step", "seconds"})
    # A figure for each data set, by the first word of its scores: few lines, each of a style of its own.
    sets: dict[str, list[str]] = {}
    for name in names:
        sets.setdefault(name.partition(" ")[0], []).append(name)
    for heading, lines, keys in (
        ("loss", run.steps, ["loss"]),
        *((each, run.evaluations, keys) for each, keys in sorted(sets.items(), reverse=True)),
        ("learning rate", run.steps, ["rate"]),
    ):
        figure = Figure((5.2, 3.2), layout="constrained")
        axes = figure.add_subplot()
        for style, key in zip(LINES * len(keys), keys, strict=False):
            points = [(line["step"], line[key]) for line in lines if key in line]
            if points:
                axes.plot(
                    *zip(*points, strict=True),
                    style,
                    color="black",
                    label=key.partition(" ")[2],
                    marker="." * (len(points) < 30),
                )
        axes.set(xlabel="step", title=heading)
        axes.grid(visible=True, color="0.9")
        if len(axes.lines) > 1:
            figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize="small", handlelength=4)
        drawn.append(_svg(figure, f"{heading} by step"))
    return drawn


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


def main() -> None:
    """Write the report."""
    parser = argparse.ArgumentParser(description="Write a run's report.")
    parser.add_argument("folder", type=Path)
    print(write(parser.parse_args().folder))


if __name__ == "__main__":
    main()
