"""docs/frameworks.md has every row and column, and counts checks not tried."""

import re

from tests.support.conforming.homes import FRAMEWORKS
from tests.support.frameworks_page import (
    FAILED,
    PAGE,
    PASSED,
    README,
    ROWS,
    cells_of,
    digits_of,
    readme_table,
    with_table,
)


def test_the_page_is_of_this_suite() -> None:
    text = PAGE.read_text(encoding="utf-8")
    cells = cells_of(text)
    assert {row for row, _ in cells} == {*ROWS, "version"}
    assert {column for _, column in cells} == set(FRAMEWORKS)
    assert [row for row in re.findall(r"^\| ([^|*]+) \|", text, re.MULTILINE) if row in ROWS] == list(ROWS)
    tried = {key: cell for key, cell in cells.items() if key[0] != "version"}
    assert FAILED not in tried.values()
    reasons = re.findall(r"^(\d+)\. (.+) \((\d+) columns?\)$", text, re.MULTILINE)
    for number, reason, columns in reasons:
        assert reason
        assert len({column for (_, column), cell in tried.items() if cell == number}) == int(columns)
    assert {cell for cell in tried.values() if cell != PASSED} == {number for number, _, _ in reasons}
    for title, wanted in (("passed", {PASSED}), ("not tried", {number for number, _, _ in reasons})):
        row = next(line for line in text.splitlines() if line.startswith(f"| **{title}** |"))
        counts = [sum(tried[check, name] in wanted for check in ROWS) for name in FRAMEWORKS]
        assert [int(each) for each in row.split("|")[2:-1]] == counts


def test_readme_has_the_pages_results_and_digits_are_learnt() -> None:
    text, readme = PAGE.read_text(encoding="utf-8"), README.read_text(encoding="utf-8")
    table = readme_table(text)
    assert table in readme, "README's table is outdated; run tests/support/frameworks_page.py"
    assert with_table(readme, table) == readme
    assert all(float(accuracy.rstrip("%")) >= 97 for accuracy, _ in digits_of(text).values())
    assert len(digits_of(text)) >= len(FRAMEWORKS) - 2  # pycaffe may be missing, and tinygrad interpreted
