"""docs/failures.md: every row of its tables names an existing test."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "failures.md").read_text(encoding="utf-8")
COLUMNS = ["failure", "detected by, when", "report", "remedy", "test"]
NAMED = re.compile(r"`((?:tests|benchmarks|native/tests)/[\w/]+\.(?:py|cc))::(\w+)`")


def cells_of(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def functions_of(path: Path) -> set[str]:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".cc":
        return set(re.findall(r"^\w+ (\w+)\(", text, re.MULTILINE))
    tree = ast.parse(text)
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_row_names_tests_that_there_are() -> None:
    tables = [line for line in PAGE.splitlines() if line.startswith("|") and not line.startswith("|---")]
    headings = [line for line in tables if cells_of(line) == COLUMNS]
    rows = [line for line in tables if cells_of(line) != COLUMNS]
    assert headings
    assert len(rows) > len(headings)
    for row in rows:
        cells = cells_of(row)
        assert len(cells) == len(COLUMNS), row
        assert cells[0], row
        named = NAMED.findall(cells[-1])
        assert named, f"no test: {row}"
        for path, name in named:
            assert (ROOT / path).exists(), f"no {path}: {row}"
            assert name in functions_of(ROOT / path), f"no {name} in {path}: {row}"
            assert name.startswith("test_") or not path.startswith("tests/"), row
