"""The numbers that the page of `multiring simulate` tells, each with the path of its value."""

from dataclasses import dataclass
from html.parser import HTMLParser
from typing import Any


@dataclass(frozen=True, slots=True)
class ToldValue:
    """A number of a page: the path of its value in the JSON object, that value as written, and the text."""

    path: str
    value: str
    text: str


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[ToldValue] = []
        self.other: list[str] = []  # the text outside of values, styles and scripts
        self._open: dict[str, str | None] | None = None
        self._hidden = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "data":
            self._open = dict(attrs)
        self._hidden += tag in {"style", "script"}

    def handle_endtag(self, tag: str) -> None:
        if tag == "data":
            self._open = None
        self._hidden -= tag in {"style", "script"}

    def handle_data(self, data: str) -> None:
        if self._open is not None:
            self.found.append(ToldValue(f"{self._open['data-of']}", f"{self._open['value']}", data))
        elif not self._hidden:
            self.other.append(data)


def told_values(page: str) -> list[ToldValue]:
    """Return the numbers of a page, in its order."""
    reader = _Reader()
    reader.feed(page)
    return reader.found


def text_outside(page: str) -> str:
    """Return the text of a page that is in no number."""
    reader = _Reader()
    reader.feed(page)
    return " ".join(reader.other)


def value_at(values: Any, path: str) -> Any:
    """Return the value at a path such as "steps.0.ranks"."""
    for name in path.split("."):
        values = values[int(name) if isinstance(values, list) else name]
    return values
