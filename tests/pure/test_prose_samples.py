"""benchmarks/tools/prose_samples.py finds all prose, and counts only readers who notice the hard lines."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from benchmarks.tools import prose_samples
from benchmarks.tools.prose_samples import Line

PYTHON = '''"""What the module is for."""

# The first half of a comment,
# and its second half.
VALUE = 1  # beside the code it explains


def checked(value):
    """Return the value that was checked."""
    if value < 0:  # noqa: PLR2004 -- a directive
        raise ValueError(f"value={value}: want 0 or more" + "; pass a count")
    # ---- a ruler ----
'''
PAGE = """# A heading is no sentence

The first sentence is short. `Code` may begin
the second one.

| name of it | what it means to readers |
|---|---|
| one | this cell has more than five words |

```
not a sentence of the page at all
```
"""
NATIVE = """// A comment of two
// lines is one.
int x = f("no // comment here");  // why it is so
"""


def prose(path: str, text: str) -> list[tuple[str, str]]:
    return [(each.kind, each.text) for each in filter(prose_samples.is_prose, prose_samples.lines_of(path, text))]


def test_each_kind_is_found() -> None:
    assert prose("src/a.py", PYTHON) == [
        ("docstring", "What the module is for."),
        ("docstring", "Return the value that was checked."),
        ("comment", "The first half of a comment, and its second half."),
        ("comment", "beside the code it explains"),
        ("error", "value={value}: want 0 or more; pass a count"),
    ]
    assert prose("docs/a.md", PAGE) == [
        ("sentence", "The first sentence is short."),
        ("sentence", "`Code` may begin the second one."),
        ("sentence", "this cell has more than five words"),
    ]
    assert prose("native/core/a.h", NATIVE) == [
        ("comment", "A comment of two lines is one."),
        ("comment", "why it is so"),
    ]


def sample(folder: Path) -> list[Line]:
    kinds = [("hidden", 20), *prose_samples.COUNTS.items()]
    lines = [Line(kind, f"{kind}.py", f"{kind} {number}") for kind, count in kinds for number in range(count)]
    (folder / "key.json").write_text(json.dumps({"lines": [asdict(each) for each in lines]}), encoding="utf-8")
    return lines


@pytest.mark.parametrize(
    ("hidden", "others", "code"), [(20, 8, 0), (16, 8, 0), (15, 0, 1), (20, 9, 1), (0, 0, 1)], ids=str
)
def test_only_readers_who_notice_count(tmp_path: Path, hidden: int, others: int, code: int) -> None:
    sample(tmp_path)
    marks = tmp_path / "reader.txt"
    marks.write_text(
        "\n".join(str(each) for each in [*range(1, hidden + 1), *range(21, 21 + others)]), encoding="utf-8"
    )
    assert prose_samples.judge(tmp_path, [marks]) == code


def test_enough_lines_are_known_to_be_hard() -> None:
    assert len(set(prose_samples.planted())) >= 2 * prose_samples.HIDDEN - 2
