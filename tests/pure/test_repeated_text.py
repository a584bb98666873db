"""No page says anything twice: a merge of two versions of a page can leave whole sections of both."""

import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path
    for folder, pattern in (("docs", "**/*.md"), ("benchmarks", "**/*.md"), (".", "*.md"))
    for path in (ROOT / folder).glob(pattern)
)
_LONG = 200  # characters of a paragraph or a table; shorter ones, such as a command, may be there twice


def places(text: str) -> list[tuple[str, ...]]:
    """Return each heading of a page outside of its code, behind the headings that it is below."""
    found: list[tuple[str, ...]] = []
    above: list[str] = []
    is_code = False
    for line in text.splitlines():
        if line.startswith("```"):
            is_code = not is_code
        head = None if is_code else re.match(r"(#{1,6}) +(.+)", line)
        if head is not None:
            above = [*above[: len(head[1]) - 1], head[2]]
            found.append((head[1], *above))
    return found


def repeated(text: str) -> list[str]:
    """Return the headings and the long paragraphs that a page has more than once."""
    heads = [" / ".join(place) for place, count in Counter(places(text)).items() if count > 1]
    paragraphs = Counter(each.strip() for each in re.split(r"\n\s*\n", text) if len(each.strip()) > _LONG)
    return heads + [each[:80] for each, count in paragraphs.items() if count > 1]


def test_there_are_pages() -> None:
    assert len(PAGES) > 100


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_page_says_anything_twice(path: Path) -> None:
    assert repeated(path.read_text(encoding="utf-8")) == []


def test_repeated_text_is_found() -> None:
    page = "# A\n\n## B\n\n## C\n\n```\n## C\n```\n\n# D\n\n## B\n"
    assert repeated(page) == []  # the sections B are of A and of D
    assert repeated(f"{page}\n## B\n") == ["## / D / B"]
    long = "word " * 60
    assert repeated(f"# A\n\n{long}\n\n# B\n\n{long}\n") == [long[:80]]
