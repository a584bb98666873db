"""The page of a prediction: one file that loads nothing else, and has no script that runs.

Every number that the page tells is in a `data` element with the path of its value in the JSON object, which the page
contains as well. So the page cannot say anything else than `--json`.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from multiring._cli.page_charts import Chart, svg_of
from multiring._replacing import replace_file, require_replaceable
from multiring.errors import ArgumentError

_MARK = b'<meta name="generator" content="multiring simulate">'
_HEAD_BYTES = 200  # the mark is there
_UNITS = ((1.0, "s", 1), (1e-3, "ms", 1e3), (0.0, "us", 1e6))
_LINKS = {"inside": "links inside a host", "rails": "rails between hosts", "uplinks": "uplinks between racks"}
_PARTS = {
    "input_wait_s": ("waiting for input", "input"),
    "outside_s": ("input and other work", "outside"),
    "forward_s": ("forward", "forward"),
    "backward_s": ("backward", "backward"),
    "waiting_s": ("waiting for slower ranks", "waiting"),
    "exposed_s": ("exposed communication", "exposed"),
    "update_s": ("update", "update"),
}
_WHOLE = 1000  # rates from here on are told without decimals
_WORTH = 0.02  # a change that gains less is none to advise
_COUNTS = ("ranks", "hosts")
_PARTS_OF_ONE = ("efficiency", "efficiency_90", "load", "faster_by", "restarted_goodput", "elastic_goodput")


def check_page(path: Path) -> None:
    """Raise ArgumentError if a page clearly cannot be written to `path`."""
    if not path.absolute().parent.is_dir():
        raise ArgumentError(f"--html {path}: no folder {path.absolute().parent}; want a file in an existing folder")
    try:
        require_replaceable(path, is_ours=_is_page, what="a page")
    except OSError as error:
        raise ArgumentError(f"--html {path}: {error.strerror}; want a file that can be written") from None


def write_page(path: Path, values: Mapping[str, Any]) -> None:
    """Write the page of `values` to `path`. It may replace an older page.

    Raises:
        ArgumentError: another file is at `path`, or it cannot be written.
    """
    try:
        replace_file(path, page_of(values).encode(), is_ours=_is_page, what="a page")
    except OSError as error:
        raise ArgumentError(f"--html {path}: {error.strerror}; want a file that can be written") from None


def _is_page(data: bytes) -> bool:
    return data.startswith(b"<!doctype html>") and _MARK in data[:_HEAD_BYTES]


def page_of(values: Mapping[str, Any]) -> str:
    """Return the page of the JSON object of `simulated_values.described`."""
    page = _Page(values)
    title = f"{values['training']} on {values['title']}"
    sections = [
        _section("", page.figures()),
        _section("Scaling", page.scaling()),
        _section(f"A step of {page.data('ranks')} ranks", page.timeline()),
        _section("Link loads", page.links()),
        _section("What bounds the step", page.bound()),
        _section("What to change", page.changes()),
        _section("Cost", page.cost()),
        *([_section("Failures", page.failures())] if values["failures"] else []),
        _section("Sources and assumptions", page.sources()),
    ]
    # An end tag in a name would end the element; JSON may write "<" as an escape.
    data = json.dumps(values).replace("<", "\\u003c")
    return _template().substitute(title=escape(title), sections="".join(sections), values=data)


def _template() -> Template:
    text = resources.files("multiring._cli").joinpath("page").joinpath("simulated.html").read_text(encoding="utf-8")
    return Template(text)


class _Page:
    """Makes the parts of a page from its values. `data` and `told` tell values of the step of the most ranks."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values
        self._steps: Sequence[Mapping[str, Any]] = values["steps"]
        self._at = max(range(len(self._steps)), key=lambda at: self._steps[at]["ranks"])
        self._step = self._steps[self._at]

    def data(self, name: str, *further: str | int) -> str:
        return self.told("steps", self._at, name, *further)

    def told(self, *path: str | int) -> str:
        """Return the value at a path as a `data` element, in the unit that the last name says."""
        value: Any = self._values
        for name in path:
            value = value[name]
        names = [name for name in path if isinstance(name, str)]
        place = ".".join(map(str, path))
        return f'<data value="{value!r}" data-of="{escape(place)}">{_told(value, names[-1])}</data>'

    def interval(self, *path: str | int) -> str:
        value: Any = self._values
        for name in path:
            value = value[name]
        return "-" if value is None else f"{self.told(*path, 0)} to {self.told(*path, 1)}"

    def figures(self) -> str:
        step = self._step
        found = [
            ("ranks", self.data("ranks")),
            ("hosts", self.data("hosts")),
            ("step", self.data("step_s")),
            ("90 % interval", self.interval("steps", self._at, "step_90_s")),
            ("samples a second", self.data("samples_per_s")),
            ("efficiency", self.data("efficiency")),
            ("bound by", escape(step["bound"])),
        ]
        if step["usd_per_million_samples"] is not None:
            found.append(("a million samples", self.data("usd_per_million_samples")))
        return f'<div class="figures">{"".join(f"<div>{name}<b>{text}</b></div>" for name, text in found)}</div>'

    def scaling(self) -> str:
        steps = sorted(self._steps, key=lambda each: each["ranks"])
        known = [each for each in steps if each["efficiency_90"] is not None]

        def alone(step: Mapping[str, Any]) -> float:
            return float(step["samples_per_s"] / step["efficiency"])

        rates = Chart(
            title="samples a second over ranks",
            points=[(each["ranks"], each["samples_per_s"]) for each in steps],
            band=[(each["ranks"], *(alone(each) * end for end in each["efficiency_90"])) for each in known],
            ideal=[(each["ranks"], alone(each)) for each in steps],
            told=lambda value: _told(value, "samples_per_s"),
            is_log=True,
        )
        efficiencies = Chart(
            title="efficiency over ranks",
            points=[(each["ranks"], each["efficiency"]) for each in steps],
            band=[(each["ranks"], *each["efficiency_90"]) for each in known],
            told=lambda value: _told(value, "efficiency"),
        )
        head = (
            "ranks",
            "hosts",
            "step",
            "90 % interval",
            "samples/s",
            "efficiency",
            "communication",
            "exposed",
            "bound",
        )
        rows = []
        for at, step in enumerate(self._steps):
            cells = [self.told("steps", at, name) for name in ("ranks", "hosts", "step_s")]
            cells.append(self.interval("steps", at, "step_90_s"))
            names = ("samples_per_s", "efficiency", "communication_s", "exposed_s")
            rows.append([*cells, *(self.told("steps", at, name) for name in names), escape(step["bound"])])
        why = "The band is the 90 % interval; the dashed line has an efficiency of 100 %."
        if not known:
            why = "No 90 % interval is known here; the dashed line has an efficiency of 100 %."
        figures = f"<figure>{svg_of(rates)}<figcaption>samples a second</figcaption></figure>"
        figures += f"<figure>{svg_of(efficiencies)}<figcaption>efficiency</figcaption></figure>"
        return f'<div class="charts">{figures}</div><p class="soft">{why}</p>{_table(head, rows)}'

    def timeline(self) -> str:
        step = self._step
        total = step["step_s"]
        bars, key = [], []
        for name, (text, kind) in _PARTS.items():
            if not step[name]:
                continue
            bars.append(f'<i class="{kind}" style="width:{100 * step[name] / total:.4f}%"></i>')
            key.append(f'<span><i class="{kind}"></i>{text}: {self.data(name)}</span>')
        found = f'<div class="bar">{"".join(bars)}</div>{self._buckets(step)}'
        ends = f'<p class="ends soft"><span>0</span><span>{self.data("step_s")}</span></p>'
        return f'{found}{ends}<p class="key">{"".join(key)}</p>'

    def _buckets(self, step: Mapping[str, Any]) -> str:
        if not step["buckets"]:
            return '<p class="soft">One rank exchanges nothing.</p>'
        start_s, total = step["input_wait_s"] + step["outside_s"] + step["forward_s"], step["step_s"]
        free: list[float] = []  # when the last bucket of each line ends
        lines = []
        for bucket in step["buckets"]:
            line = next((line for line, until in enumerate(free) if until <= bucket["ready_s"]), len(free))
            free[line : line + 1] = [bucket["end_s"]]
            lines.append(line)
        height = max(3, min(14, 240 // len(free)))  # pixels of a line
        bars = []
        for at, (bucket, line) in enumerate(zip(step["buckets"], lines, strict=True)):
            flies_s = bucket["end_s"] - bucket["ready_s"]
            place = f"left:{100 * (start_s + bucket['ready_s']) / total:.4f}%;width:{100 * flies_s / total:.4f}%"
            place += f";top:{line * height}px;height:{height - 1}px"
            said = f"bucket {at}: {_told(bucket['size_bytes'], 'size_bytes')}, {_told(flies_s, 's')}"
            bars.append(f'<i class="bucket" style="{place}" title="{said}"></i>')
        return (
            f'<div class="buckets" style="height:{height * len(free)}px">{"".join(bars)}</div>'
            '<p class="soft">Buckets of gradients in flight, from the moment when one is complete to its end.</p>'
        )

    def links(self) -> str:
        rows = []
        for name in self._step["links"]:
            load, busy_s = self.data("links", name, "load"), self.data("links", name, "busy_s")
            part = min(1.0, self._step["links"][name]["load"])
            rows.append(
                f"<p>{_LINKS[name]}: {load} of the step, {busy_s}</p>"
                f'<div class="bar"><i class="bucket" style="width:{100 * part:.4f}%"></i></div>'
            )
        why = "A rank's part of each kind of link, while it sends the gradients of a step."
        return f'{"".join(rows)}<p class="soft">{why}</p>' if rows else '<p class="soft">One rank sends nothing.</p>'

    def bound(self) -> str:
        words = {
            "slower ranks": "The steps of one rank vary, and all ranks wait for the slowest of each step.",
            "communication": "Backward does not hide enough of the communication.",
            "compute": "The ranks compute for most of the step; faster links would gain little.",
            "input": "Workers take longer to make the samples of a step than the rest of the step takes beside them.",
            "other work": "The script does other work for most of the step.",
            "input or other work": "The ranks wait for input, or the script does other work, for most of the step.",
        }[self._step["bound"]]
        return (
            f"<p><b>{escape(self._step['bound'])}</b>. {words}</p><p>Exposed are {self.data('exposed_s')} of "
            f"{self.data('communication_s')} in which gradients are in flight. Compute takes {self.data('compute_s')}, "
            f"the slowest rank of a step {self.data('waiting_s')} longer, the update {self.data('update_s')}, and "
            f"input and other work {self.data('outside_s')}.</p>{self._input()}"
        )

    def _input(self) -> str:
        found = self._step["input"]
        if found is None:
            return ""
        return (
            f"<p>The workers of a rank make {self.data('input', 'samples_per_s_of_rank')} samples a second, bounded by "
            f"{escape(found['bound'])}. The rank waits {self.data('input_wait_s')} a step for them.</p>"
        )

    def changes(self) -> str:
        found = self._values["changes"]["of"]
        if not found:
            return '<p class="soft">One rank has nothing to change between ranks.</p>'
        best = found[0]
        said = f"Best: {escape(best['what'])}." if best["faster_by"] >= _WORTH else "None of these gains 2 % or more."
        rows = []
        for at, each in enumerate(found):
            names = ("step_s", "exposed_s", "efficiency", "faster_by")
            cells = [self.told("changes", "of", at, name) for name in names]
            rows.append([escape(each["what"]), *cells, "yes" if each["alters_training"] else "no"])
        head = ("change", "step", "exposed", "efficiency", "faster by", "alters the training")
        return f"<p>{said} Each changes one setting of {self.told('changes', 'ranks')} ranks.</p>{_table(head, rows)}"

    def cost(self) -> str:
        if self._values["usd_per_host_hour"] is None:
            return '<p class="soft">This cluster has no price.</p>'
        rows = [
            [self.told("steps", at, "ranks"), self.told("steps", at, "usd_per_million_samples")]
            for at in range(len(self._steps))
        ]
        price = f"A host costs {self.told('usd_per_host_hour')} an hour ({escape(self._values['priced'])})."
        return f"<p>{price}</p>{_table(('ranks', 'a million samples'), rows)}"

    def failures(self) -> str:
        of = {name: self.told("failures", name) for name in self._values["failures"]}
        rows = [
            [self.told("steps", at, name) for name in ("ranks", "hosts", "restarted_goodput", "elastic_goodput")]
            for at in range(len(self._steps))
        ]
        return (
            f"<p>Goodput, the part of the failure-free work that gets done, if a host fails {of['per_hour']} times an "
            f"hour. A commit every {of['commit_every_s']} delays the training by {of['commit_s']}. A job that is "
            f"restarted stands still for {of['restart_s']}. An elastic job goes on after {of['go_on_s']}, without the "
            f"host for {of['restart_s']}.</p>{_table(('ranks', 'hosts', 'restarted', 'elastic'), rows)}"
        )

    def sources(self) -> str:
        remarks = "".join(f"<p>{escape(each)}</p>" for each in self._values["remarks"])
        sources: Mapping[str, str] = self._values["sources_of_topology"]
        rows = "".join(f"<li>{escape(name)}: {escape(source)}</li>" for name, source in sources.items())
        listed = f"<details><summary>The numbers of the cluster</summary><ul>{rows}</ul></details>" if rows else ""
        return f"{remarks}{listed}"


def _told(value: float, name: str) -> str:
    """Return a value as text; the unit is that of its name."""
    if name in _COUNTS or (name == "samples_per_s" and value >= _WHOLE):
        return f"{value}" if name in _COUNTS else f"{value:,.0f}"
    if name in _PARTS_OF_ONE:
        return f"{100 * value:.4g} %"
    if name == "size_bytes":
        return f"{value / (1 << 20):.4g} MiB"
    if name == "s" or (name.endswith("_s") and name != "samples_per_s"):
        _, unit, times = next(each for each in _UNITS if value >= each[0]) if value else _UNITS[1]
        return f"{value * times:.4g} {unit}"
    return f"{value:.4g} USD" if name.startswith("usd") else f"{value:.4g}"


def _section(title: str, body: str) -> str:
    return f"<section>{f'<h2>{title}</h2>' if title else ''}{body}</section>\n"


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    top = "".join(f"<th>{each}</th>" for each in head)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def _cell(text: str) -> str:
    # A long name is broken, a number is not.
    return f"<td>{text}</td>" if text.startswith("<data") else f'<td class="text">{text}</td>'
