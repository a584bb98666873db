"""benchmarks/README.md lists every program with its first line, and no other file; no file hides a library."""

import ast
import re
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "benchmarks"
ROW = re.compile(r"^\| `([\w/]+\.py)` \| (.+) \| ([^|]+) \|$", re.MULTILINE)


def heads() -> dict[str, str]:
    """Return the docstring of each program, a file whose docstring shows how to start it."""
    found = {}
    for path in sorted(FOLDER.rglob("*.py")):
        head = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        name = str(path.relative_to(FOLDER))
        if re.search(rf"python benchmarks/{re.escape(name)}\b", head):
            found[name] = head
    return found


def test_every_program_is_listed_with_its_first_line_and_a_time() -> None:
    rows = ROW.findall((FOLDER / "README.md").read_text(encoding="utf-8"))
    first_lines = {name: head.split("\n")[0] for name, head in heads().items()}
    assert len(first_lines) > 40
    assert {name: text for name, text, _ in rows} == first_lines
    assert all(time.strip() for *_, time in rows)


def test_no_file_beside_a_program_hides_a_library() -> None:
    """Python searches the folder of the started program first."""
    known = {*sys.stdlib_module_names, "caffe", "chainer", "horovod", "jax", "keras", "numpy", "tensorflow", "torch"}
    starting = {path.parent for path in FOLDER.rglob("*.py") if "__main__" in path.read_text(encoding="utf-8")}
    assert starting
    for folder in starting:
        assert not known & {each.stem for each in folder.iterdir() if not each.name.startswith("__")}, folder
