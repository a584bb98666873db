"""docs/decisions/README.md has a row for each decision, with its number and a sentence."""

import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "docs" / "decisions"
LINES = (FOLDER / "README.md").read_text(encoding="utf-8").splitlines()
ROWS = [
    found.groups() for line in LINES if (found := re.fullmatch(r"\| \[(\d{4})\]\((\S+\.md)\) \| (\S.*\S) \|", line))
]
_MOST_WORDS = 25


def test_the_index_has_each_decision_once_and_in_order() -> None:
    records = sorted(path.name for path in FOLDER.glob("*.md") if path.name != "README.md")
    assert [file for _, file, _ in ROWS] == records
    assert all(file.startswith(f"{number}-") for number, file, _ in ROWS)


def test_every_row_of_the_table_is_such_a_row() -> None:
    assert len(ROWS) == len([line for line in LINES if line.startswith("|")]) - 2  # minus the two heading lines


@pytest.mark.parametrize(("number", "sentence"), [(number, sentence) for number, _, sentence in ROWS])
def test_a_decision_is_told_in_one_sentence(number: str, sentence: str) -> None:
    assert sentence.endswith("."), number
    assert ". " not in sentence, number
    assert len(sentence.split()) <= _MOST_WORDS, (number, len(sentence.split()))
