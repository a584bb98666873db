"""docs/glossary.md: names do not use the former words, and prose does not use those that the table marks."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from tokenize import COMMENT
from typing import NamedTuple

import pytest

from multiring._former_names import FORMER_MODULES

ROOT = Path(__file__).parents[2]
ROWS = re.findall(
    r"^\| ([\w!]+) \| ([^|]+) \| ([^|]+) \|([^|]*)\|([^|]*)\|$",
    (ROOT / "docs/glossary.md").read_text("utf-8"),
    re.MULTILINE,
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
    prose: str

    @property
    def pattern(self) -> str:
        """The regular expression of the old word in prose."""
        return rf"\b{self.old.rstrip('!').replace('_', '[_ -]')}(?:s|es|d|ed|ing)?\b"

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
        Word(
            old,
            new,
            tuple(where.strip().split(", ")),
            frozenset(each.strip(" _") for each in but.split(",")) - {""},
            prose.strip(),
        )
        for old, new, where, but, prose in ROWS
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


def prose_of_python(text: str) -> str:
    """Return the comments and docstrings of a module."""
    comments = [each.string for each in tokenize.generate_tokens(io.StringIO(text).readline) if each.type == COMMENT]
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = [ast.get_docstring(each) or "" for each in ast.walk(ast.parse(text)) if isinstance(each, kinds)]
    return "\n".join(comments + docstrings)


def prose_of_cpp(text: str) -> str:
    """Return the comments of a C++ file."""
    return "\n".join(re.findall(r"//[^\n]*|/\*.*?\*/", text, re.DOTALL))


def without_code(prose: str) -> str:
    """Return prose without code in backticks."""
    return re.sub(r"```.*?```|`[^`]*`", " ", prose, flags=re.DOTALL)


def texts_with_prose() -> Iterator[tuple[str, str]]:
    """Yield (file, text) for the code in `native` and `src`, and for the pages that are kept current."""
    code = [*(ROOT / "src").rglob("*"), *(ROOT / "native").rglob("*")]
    pages = [*(ROOT / "docs").glob("*.md"), *ROOT.glob("*.md")]
    former = {"CHANGELOG.md", "glossary.md", "log.md"}  # these keep former words; so do decisions
    for path in [*code, *(page for page in pages if page.name not in former)]:
        if path.suffix in {".py", ".cc", ".h", ".md"}:
            yield str(path.relative_to(ROOT)), path.read_text("utf-8")


def prose_of(file: str, text: str) -> str:
    """Return the prose of a file, without code in backticks."""
    if file.endswith(".md"):
        return without_code(text)
    return without_code(prose_of_python(text) if file.endswith(".py") else prose_of_cpp(text))


def names_below(where: str) -> Iterator[tuple[str, str]]:
    """Yield (file, name) for the names of files, folders and code below `where`, a folder or a file."""
    top = ROOT / where
    refusing = {ROOT.joinpath("src", *each.split(".")).with_suffix(".py") for each in FORMER_MODULES}
    for path in [top] if top.is_file() else sorted(top.rglob("*")):
        if path.suffix not in {".py", ".cc", ".h"} or path in refusing or "onpath" in path.parts:
            continue  # a module of a former name, or Horovod's names
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


def test_no_prose_has_an_old_word() -> None:
    checked = [word for word in words() if word.prose]
    assert len(checked) >= 40
    texts = dict(texts_with_prose())
    assert len(texts) > 500
    any_word = re.compile("|".join(word.pattern for word in checked), re.IGNORECASE)
    suspects = {file: prose_of(file, text) for file, text in texts.items() if any_word.search(text)}
    found = [
        (file, match.group(), word.new)
        for file, prose in suspects.items()
        for word in checked
        if file.startswith(tuple(where.removeprefix("modules of ") for where in word.where))
        or (file.endswith(".md") and word.prose == "yes")
        for match in re.finditer(word.pattern, prose, re.IGNORECASE)
    ]
    assert not found, "use the field's word"


@pytest.mark.parametrize("word", words(), ids=lambda word: word.old)
def test_an_exception_is_there(word: Word, names: dict[str, set[tuple[str, str]]]) -> None:
    assert word.but <= {name.strip("_") for where in word.where for _, name in names[where]}


def test_what_is_seen() -> None:
    python = "class Door(Post):\n    bell: int\n    def prod(self, line): self.sight = 1\n\nMIX = 'parcel'  # card\n"
    assert sorted(names_in_python(python)) == ["Door", "MIX", "bell", "prod", "sight"]
    cpp = '#include "parcel.h"\nint bell_ = std::exchange(prod, "doom"); // card\n/* line\n */ f(\'m\', R"(mix)");'
    assert sorted(set(names_in_cpp(cpp)) - {"int"}) == ["bell_", "f", "prod"]
    assert parts_of("early_SendCounts") == ["early", "send", "counts"]
    assert Word("tally", "", (), frozenset(), prose="").is_in("_my_tallies")
    assert not Word("mix", "", (), frozenset({"un_mix"}), prose="").is_in("un_mix")
    assert not Word("Exchange!", "", (), frozenset(), prose="").is_in("exchange")


def test_what_prose_is_seen() -> None:
    python = '"""Doom."""\n\n\ndef prod(): # bells\n    """Tell `parcel`."""\n    return "card"\n'
    assert without_code(prose_of_python(python)).split() == ["#", "bells", "Doom.", "Tell", "."]
    assert prose_of_cpp('// bell\nint prod; /* doom */ "card"') == "// bell\n/* doom */"
    word = Word("stand_in!", "", (), frozenset(), prose="yes")
    assert re.search(word.pattern, "the stand-ins of ranks")
    assert not re.search(word.pattern, "understand_in")
