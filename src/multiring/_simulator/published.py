"""Read published runs from a file: how well they scaled, on which cluster, and where each number comes from.

docs/simulate.md describes the format. An error names the line and the field.
"""

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from multiring._simulator.layers import Layer, layers_of, model_names
from multiring._simulator.presets import Preset, preset, preset_names, preset_of_table
from multiring.errors import ArgumentError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_TABLES = ("sources", "clusters", "models", "rates", "rows")
_RATE = ("accelerator", "model", "precision", "batch", "samples_per_s", "source")
_MODEL = ("layers", "parameters", "source")
_ROW = ("name", "cluster", "model", "precision", "batch_per_rank", "ranks", "relative_to", "efficiency")
_ROW_MORE = ("samples_per_s", "samples_per_s_before", "source", "rate", "gradient_bytes", "gradient_source", "fitted")
# A model of which only the number of parameters is known is cut into so many equal layers.
_EQUAL_LAYERS = 50


@dataclass(frozen=True, slots=True)
class PublishedRate:
    """The samples a second of one accelerator, with the name of its source."""

    accelerator: str
    model: str
    precision: str
    batch: int
    samples_per_s: float
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedRow:
    """A published run: `low` to `high` is its efficiency relative to `relative_to` ranks.

    An element of a gradient has `gradient_bytes` on the wire. `uncounted` is the reason why the row does not count, or
    empty.
    """

    name: str
    cluster: Preset
    model: str
    layers: list[Layer]
    batch_per_rank: int
    ranks: int
    relative_to: int
    low: float
    high: float
    rate: PublishedRate
    gradient_bytes: int
    uncounted: str


def published_rows(path: str) -> list[PublishedRow]:
    """Return the rows of a file.

    Raises:
        ArgumentError: the file cannot be read, or a field is unknown, missing or wrong.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"cannot read {path}: {error}") from None
    return rows_of(text, path)


def rows_of(text: str, path: str) -> list[PublishedRow]:
    """Return the rows in `text`, the content of the file `path`.

    Raises:
        ArgumentError: a field is unknown, missing or wrong.
    """
    try:
        whole = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ArgumentError(f"{path} is not valid TOML: {error}") from None
    file = _File(whole, text, path)
    file.refuse_strange(_TABLES)
    if not isinstance(whole.get("rows"), list) or not whole["rows"]:
        raise ArgumentError(f"{path}: no [[rows]]: want a table for each published run")
    sources = _sources(file)
    rates = {name: _rate(file.part("rates", name), sources) for name in file.names("rates")}
    models = {name: _model(file.part("models", name)) for name in file.names("models")}
    clusters = {name: _cluster(file.part("clusters", name)) for name in file.names("clusters")}
    rows = [_row(file.row(at), sources, rates, models, clusters) for at in range(len(whole["rows"]))]
    for earlier, later in pairwise(sorted(row.name for row in rows)):
        if earlier == later:
            raise ArgumentError(f"{path}: two rows have the name {later!r}: want a name of its own for each row")
    return rows


class _Table:
    """A table of the file; `lines` are its first line and the line after its last, both from 0."""

    def __init__(self, values: Any, file: "_File", name: str, lines: tuple[int, int]) -> None:
        self.values: Mapping[str, Any] = values if isinstance(values, Mapping) else {}
        self.name, self._file, self._lines = name, file, lines
        if not isinstance(values, Mapping):
            raise self.error("", "want a table")

    def error(self, field: str, words: str) -> ArgumentError:
        first, end = self._lines
        pattern = re.compile(rf"""\s*["']?{re.escape(field)}["']?\s*=""")
        lines = self._file.lines[first:end]
        line = next((at for at, each in enumerate(lines, first) if field and pattern.match(each)), first)
        shown = f".{field} = {self.values[field]!r}" if field in self.values else f".{field}" if field else ""
        return ArgumentError(f"{self._file.path}, line {line + 1}: {self.name}{shown}: {words}")

    def refuse_strange(self, known: Sequence[str]) -> None:
        for field in self.values:
            if field not in known:
                raise self.error(field, f"unknown: want {', '.join(known)}")

    def text(self, field: str) -> str:
        found = self.values.get(field)
        if not isinstance(found, str) or not found.strip():
            raise self.error(field, "want a text that is not empty")
        return found

    def one_of(self, field: str, known: Sequence[str]) -> str:
        found = self.text(field)
        if found not in known:
            raise self.error(
                field, f"want one of {', '.join(sorted(known)) or 'the names in this file, which has none'}"
            )
        return found

    def whole(self, field: str, default: int | None = None) -> int:
        found = self.values.get(field, default)
        if not isinstance(found, int) or isinstance(found, bool) or found < 1:
            raise self.error(field, "want a whole number above 0")
        return found

    def number(self, field: str) -> float:
        found: Any = self.values.get(field)
        if not _is_positive(found):
            raise self.error(field, "want a number above 0")
        return float(found)

    def range(self, field: str) -> tuple[float, float]:
        found: Any = self.values.get(field)
        ends: list[Any] = found if isinstance(found, list) else [found, found]
        if len(ends) != 2 or not all(map(_is_positive, ends)) or ends[0] > ends[1]:
            raise self.error(field, "want a number above 0, or a range [low, high]")
        return float(ends[0]), float(ends[1])


class _File(_Table):
    """The whole file."""

    def __init__(self, values: Mapping[str, Any], text: str, path: str) -> None:
        self.lines, self.path = text.splitlines(), path
        super().__init__(values, self, "the file", (0, len(self.lines)))

    def names(self, group: str) -> list[str]:
        found = self.values.get(group, {})
        if not isinstance(found, Mapping):
            raise self.error(group, f"want tables [{group}.NAME]")
        return list(found)

    def part(self, group: str, name: str) -> _Table:
        header = re.compile(rf"""\s*\[+\s*{group}\s*\.\s*["']?{re.escape(name)}["']?\s*[.\]]""")
        return _Table(self.values[group][name], self, f"{group}.{name}", self._lines_of(header.match, 0))

    def row(self, at: int) -> _Table:
        return _Table(
            self.values["rows"][at], self, "rows", self._lines_of(re.compile(r"\s*\[\[\s*rows\s*\]\]").match, at)
        )

    def _lines_of(self, is_header: Callable[[str], Any], skipped: int) -> tuple[int, int]:
        """Return the lines of a table and of the tables in it, after as many that `is_header` finds as are skipped."""
        starts = [at for at, line in enumerate(self.lines) if is_header(line)][skipped:]
        if not starts:
            return 0, len(self.lines)
        others = [at for at in range(starts[0] + 1, len(self.lines)) if self.lines[at].lstrip().startswith("[")]
        ends = [at for at in others if at not in starts or skipped or self.lines[at].lstrip().startswith("[[rows")]
        return starts[0], ends[0] if ends else len(self.lines)


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")


def _sources(file: _File) -> list[str]:
    names = file.names("sources")
    table = _Table(file.values.get("sources", {}), file, "sources", (0, len(file.lines)))
    known: dict[str, str] = {}
    for name in names:
        words = table.text(name)
        if words in known:
            # Otherwise a row could take its rate from the source of its scaling, and count.
            raise table.error(name, f"the same source as {known[words]!r}: want one name for each source")
        known[words] = name
    return names


def _rate(table: _Table, sources: Sequence[str]) -> PublishedRate:
    table.refuse_strange(_RATE)
    return PublishedRate(
        accelerator=table.text("accelerator"),
        model=table.text("model"),
        precision=table.text("precision"),
        batch=table.whole("batch"),
        samples_per_s=table.number("samples_per_s"),
        source=table.one_of("source", sources),
    )


def _model(table: _Table) -> list[Layer]:
    table.refuse_strange(_MODEL)
    table.text("source")
    if ("layers" in table.values) == ("parameters" in table.values):
        raise table.error("layers", "want either `layers` or `parameters`")
    if "parameters" in table.values:
        count = table.whole("parameters")
        if count < _EQUAL_LAYERS:
            raise table.error("parameters", f"want at least {_EQUAL_LAYERS}")
        ends = [count * at // _EQUAL_LAYERS for at in range(_EQUAL_LAYERS + 1)]
        return [Layer(f"part {at}", (end - start,), 1, 0) for at, (start, end) in enumerate(pairwise(ends))]
    found = table.values["layers"]
    if not isinstance(found, list) or not found or not all(_is_layer(each) for each in found):
        raise table.error("layers", "want pairs of whole numbers above 0: [parameters, multiplications for one sample]")
    return [Layer(f"layer {at}", (parameters,), operations, 0) for at, (parameters, operations) in enumerate(found)]


def _is_layer(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(type(x) is int and x > 0 for x in value)


def _cluster(table: _Table) -> Preset:
    try:
        return preset_of_table(table.values, table.name)
    except ArgumentError as error:
        raise table.error("", str(error)) from None


def _row(
    table: _Table,
    sources: Sequence[str],
    rates: Mapping[str, PublishedRate],
    models: Mapping[str, list[Layer]],
    clusters: Mapping[str, Preset],
) -> PublishedRow:
    table.refuse_strange(_ROW + _ROW_MORE)
    name, precision = table.text("name"), table.text("precision")
    model = table.one_of("model", [*models, *model_names()])
    place = table.one_of("cluster", [*clusters, *preset_names()])
    cluster = clusters[place] if place in clusters else preset(place)
    ranks, relative_to = table.whole("ranks"), table.whole("relative_to", 1)
    if not relative_to < ranks <= cluster.topology.ranks:
        raise table.error(
            "ranks",
            f"want more than {relative_to}, to which the row is relative, and at most the {cluster.topology.ranks} of "
            "its cluster",
        )
    rate = rates[table.one_of("rate", list(rates))]
    source = table.one_of("source", sources)
    low, high = _efficiency(table, ranks / relative_to)
    if "gradient_bytes" in table.values:
        table.text("gradient_source")
    fitted = table.text("fitted") if "fitted" in table.values else ""
    uncounted = f"fitted: {fitted}" if fitted else ""
    if (rate.accelerator, rate.model, rate.precision) != (cluster.accelerator, model, precision):
        uncounted = f"its rate is of {rate.model} in {rate.precision} on a {rate.accelerator}"
    elif rate.source == source and not fitted:
        uncounted = f"its rate is from {source!r}, the source of its scaling"
    return PublishedRow(
        name=name,
        cluster=cluster,
        model=model,
        layers=models[model] if model in models else layers_of(model),
        batch_per_rank=table.whole("batch_per_rank"),
        ranks=ranks,
        relative_to=relative_to,
        low=low,
        high=high,
        rate=rate,
        gradient_bytes=table.whole("gradient_bytes", 4),
        uncounted=uncounted,
    )


def _efficiency(table: _Table, times: float) -> tuple[float, float]:
    """Return the efficiency of a row on `times` as many ranks as before."""
    if ("efficiency" in table.values) == ("samples_per_s" in table.values):
        raise table.error("efficiency", "want either `efficiency`, or `samples_per_s` with `samples_per_s_before`")
    if "efficiency" in table.values:
        low, high = table.range("efficiency")
    else:
        before = table.number("samples_per_s_before")
        low, high = (rate / before / times for rate in table.range("samples_per_s"))
    if high > 1.5:  # a published efficiency is hardly above 1, so two numbers are mixed up
        field = "efficiency" if "efficiency" in table.values else "samples_per_s"
        raise table.error(field, f"an efficiency of {high:.3g}: want a part of 1")
    return low, high
