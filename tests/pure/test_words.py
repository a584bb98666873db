"""docs/glossary.md: no name in the code uses a former word of the glossary."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
ROWS = re.findall(
    r"^\| ([\w!]+) \| ([^|]+) \| ([^|]+) \|([^|]*)\|$", (ROOT / "docs/glossary.md").read_text("utf-8"), re.MULTILINE
)[1:]  # without the heading
# C++ text that contains no names of ours: comments, raw strings, strings, characters, file names, and std.
NO_NAME = re.compile(
    r"""//[^\n]*|/\*.*?\*/|R"(\w*)\(.*?\)\1"|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|\#include[^\n]*|std::\w+""",
    re.DOTALL,
)


class Word(NamedTuple):
    """A row of the glossary."""

    old: str
    new: str
    where: tuple[str, ...]
    but: frozenset[str]

    def is_in(self, name: str) -> bool:
        """Return whether `name` uses the old word."""
        if name.startswith("__") or name.strip("_") in self.but:  # Python's own name, or an allowed name
            return False
        if self.old.endswith("!"):
            return name.strip("_") == self.old[:-1]
        plurals = {self.old, f"{self.old}s", f"{self.old}es", f"{self.old[:-1]}ies"}
        return not plurals.isdisjoint(parts_of(name))


def words() -> list[Word]:
    """Return the rows of the glossary."""
    return [
        Word(old, new, tuple(where.strip().split(", ")), frozenset(each.strip(" _") for each in but.split(",")) - {""})
        for old, new, where, but in ROWS
    ]


def parts_of(name: str) -> list[str]:
    """Return the words of a name in lower case."""
    return re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name).lower().split("_")


def names_in_python(text: str) -> Iterator[str]:
    """Yield the classes, functions and attributes that a module defines."""
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.ClassDef(name=name, body=body):
                yield name
                yield from (target for each in body for target in _targets(each))
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name
            case ast.Attribute(attr=name, ctx=ast.Store()):
                yield name
            case ast.Module(body=body):
                yield from (target for each in body for target in _targets(each))


def _targets(statement: ast.stmt) -> Iterator[str]:
    found = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    yield from (each.id for each in found if isinstance(each, ast.Name))


def names_in_cpp(text: str) -> Iterator[str]:
    """Yield the names in a C++ file."""
    yield from re.findall(r"\b[A-Za-z_]\w*", NO_NAME.sub(" ", text))


def names_below(where: str) -> Iterator[tuple[str, str]]:
    """Yield (file, name) for the names of files, folders and code below `where`, a folder or a file."""
    top = ROOT / where
    for path in [top] if top.is_file() else sorted(top.rglob("*")):
        if path.suffix not in {".py", ".cc", ".h"} or "onpath" in path.parts:  # names from Horovod
            continue
        file = str(path.relative_to(ROOT))
        yield file, path.stem
        yield from ((file, part) for part in path.relative_to(ROOT).parts[:-1])
        found = names_in_python if path.suffix == ".py" else names_in_cpp
        yield from ((file, name) for name in found(path.read_text("utf-8")))


@pytest.fixture(scope="module")
def names() -> dict[str, set[tuple[str, str]]]:
    """Return the names in each place that the glossary lists."""
    return {where: set(names_below(where)) for where in sorted({where for word in words() for where in word.where})}


def test_the_glossary_is_read() -> None:
    lines = (ROOT / "docs/glossary.md").read_text("utf-8").splitlines()
    assert len(ROWS) == sum(line.startswith("| ") for line in lines) - 1 >= 50  # without the heading


@pytest.mark.parametrize("word", words(), ids=lambda word: word.old)
def test_no_name_has_an_old_word(word: Word, names: dict[str, set[tuple[str, str]]]) -> None:
    found = {(file, name) for where in word.where for file, name in names[where] if word.is_in(name)}
    assert not found, f"use the field's word: {word.new}"


@pytest.mark.parametrize("word", words(), ids=lambda word: word.old)
def test_an_exception_is_there(word: Word, names: dict[str, set[tuple[str, str]]]) -> None:
    assert word.but <= {name.strip("_") for where in word.where for _, name in names[where]}


def test_what_is_seen() -> None:
    python = "class Door(Post):\n    bell: int\n    def prod(self, line): self.sight = 1\n\nMIX = 'parcel'  # card\n"
    assert sorted(names_in_python(python)) == ["Door", "MIX", "bell", "prod", "sight"]
    cpp = '#include "parcel.h"\nint bell_ = std::exchange(prod, "doom"); // card\n/* line\n */ f(\'m\', R"(mix)");'
    assert sorted(set(names_in_cpp(cpp)) - {"int"}) == ["bell_", "f", "prod"]
    assert parts_of("early_SendCounts") == ["early", "send", "counts"]
    assert Word("tally", "", (), frozenset()).is_in("_my_tallies")
    assert not Word("mix", "", (), frozenset({"un_mix"})).is_in("un_mix")
    assert not Word("Exchange!", "", (), frozenset()).is_in("exchange")
