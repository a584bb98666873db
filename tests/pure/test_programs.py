"""The programs of benchmarks and examples start as their docstrings say: `python benchmarks/PLACE/NAME.py`."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HERE = {"benchmarks", "tests"}  # packages that are not installed; a program must add their folder to the path first


def programs() -> list[Path]:
    """Return the programs that the Makefile or their own docstring runs directly. Ranks get the path from their job."""
    makefile = (ROOT / "Makefile").read_text()
    files = sorted([*(ROOT / "benchmarks").rglob("*.py"), *(ROOT / "examples").rglob("*.py")])
    return [
        path
        for path in files
        if str(path).removeprefix(f"{ROOT}/benchmarks/") in makefile.split()
        or f"python {path.relative_to(ROOT)}" in head(path)
    ]


def head(path: Path) -> str:
    return ast.get_docstring(ast.parse(path.read_text())) or ""


@pytest.mark.parametrize("program", programs(), ids=lambda path: str(path.relative_to(ROOT)))
def test_programs_set_the_path_before_they_import_from_it(program: Path) -> None:
    assert not imports_too_early(program.read_text())


def test_a_program_that_sets_no_path_is_found() -> None:
    early = "import sys\nfrom benchmarks.evidence.jobs.main import main\nsys.path.insert(0, '..')\n"
    assert imports_too_early(early) == {"benchmarks.evidence.jobs.main"}
    assert not imports_too_early(
        "import sys\nsys.path.insert(0, '..')\nfrom benchmarks.evidence.jobs.main import main\n"
    )


def imports_too_early(text: str) -> set[str]:
    """Return the modules of HERE that a program imports at top level before it sets the path."""
    early: set[str] = set()
    for statement in ast.parse(text).body:
        if "sys.path.insert" in ast.unparse(statement):
            return early
        if isinstance(statement, ast.ImportFrom) and (statement.module or "").split(".")[0] in HERE:
            early.add(statement.module or "")
        if isinstance(statement, ast.Import):
            early |= {name.name for name in statement.names if name.name.split(".")[0] in HERE}
    return early
