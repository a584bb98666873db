"""docs/architecture.md names only existing packages, files and symbols."""

import re
from pathlib import Path

import pytest
from tests.contracts import drawing

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
TABLE = re.findall(r"^\| ([^|`]+) \| `([^`]+)` \| `([^`]+)` \|$", PAGE, re.MULTILINE)


def test_the_drawing_is_that_of_the_contracts() -> None:
    assert f"```\n{drawing()}\n```" in PAGE


def test_there_are_answers() -> None:
    assert len(TABLE) >= 20


@pytest.mark.parametrize(("question", "file", "name"), TABLE, ids=[question for question, *_ in TABLE])
def test_an_answer_is_there(question: str, file: str, name: str) -> None:
    text = (ROOT / file).read_text(encoding="utf-8")
    if file.endswith(".py"):  # the file defines or raises the name
        assert re.search(rf"^ *(def|class) {name}\b|^ *{name}\b[^=\n]* = |^    {name},$", text, re.MULTILINE), question
    assert re.search(rf"\b{name}\b", text), (question, file, name)


PATHS = r"(?:data|_frontend|_gradients|native|_runtime|tensorflow|torch)/[\w/]+\.(?:py|cc|h)"


def in_source(path: str) -> Path:
    return next((each for each in (ROOT / path, ROOT / "src" / "multiring" / path) if each.exists()), ROOT / path)


def test_paths_in_the_text_are_there() -> None:
    found = re.findall(rf"(?<!\w)({PATHS})", PAGE)
    assert len(found) > 40
    for path in found:
        assert in_source(path).exists(), path


def test_names_of_the_ways_are_where_they_are_said_to_be() -> None:
    found = re.findall(rf"`(?:\w+\.)?(\w+)`\s+\(({PATHS})", PAGE)
    assert len(found) > 30
    for name, path in found:
        text = in_source(path).read_text(encoding="utf-8")
        assert re.search(rf"\b(?:def|class|struct) {name}\b", text), (name, path)
