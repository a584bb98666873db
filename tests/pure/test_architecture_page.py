"""docs/architecture.md names what there is: rooms, files and symbols."""

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
    if file.endswith(".py"):  # it is made there, or raised
        assert re.search(rf"^ *(def|class) {name}\b|^ *{name}\b[^=\n]* = |^    {name},$", text, re.MULTILINE), question
    assert re.search(rf"\b{name}\b", text), (question, file, name)


def test_paths_in_the_text_are_there() -> None:
    for path in re.findall(r"\(((?:torch|gradients|runtime|native|frontend)/[\w/]+\.(?:py|cc|h))", PAGE):
        assert (ROOT / path).exists() or (ROOT / "src" / "multiring" / path).exists(), path
