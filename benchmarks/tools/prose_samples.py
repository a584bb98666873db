"""Draw samples of the project's prose and judge readers' marks.

    python benchmarks/tools/prose_samples.py draw [COMMIT] [--out FOLDER]
    python benchmarks/tools/prose_samples.py judge FOLDER MARKS [MARKS ...]

The readers should not be the writers. `draw` takes 60 docstrings, 60 comments, 90 error messages and 70 sentences of
the pages at COMMIT (default: HEAD). It hides 20 lines among them that are known to be hard to read. The commit's hash
is the seed, so nobody can choose a convenient sample. FOLDER (default: build/prose/COMMIT) gets `sample.txt` for the
readers, numbered and shuffled, and `key.json` with the source of each line.

A reader writes the numbers of all lines that needed a second reading into a file, MARKS. `judge` prints the share of
marked lines of each kind. Readers who missed more than 4 of the hidden lines do not count. The exit code is 1 if no
reader counts, or if a counting reader marked more than 3 in 100.
"""

import argparse
import ast
import io
import json
import random
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PLANTED = Path(__file__).with_name("prose_planted.txt")
COUNTS = {"docstring": 60, "comment": 60, "error": 90, "sentence": 70}
HIDDEN = 20
MISSES_ALLOWED = 4
MARKED_ALLOWED = 0.03
CODE_FOLDERS = ("src", "native", "examples", "benchmarks", "tests")
# Decisions, the log, the changes and recorded results are not revised. docs/style.md quotes hard sentences.
KEPT = ("docs/decisions/", "docs/log.md", "docs/glossary.md", "docs/style.md", "CHANGELOG.md", "benchmarks/results/")
STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
NO_PROSE = re.compile(r"noqa|type: ?ignore|pragma|NOLINT|-{3,}|={3,}|IWYU|clang-format")
ERROR_NAMES = re.compile(r"(Error|Exception|Failed|Fault|Warning|warn|warning|error)$")


@dataclass(frozen=True, slots=True)
class Line:
    """A piece of prose, and its place in the repository."""

    kind: str
    place: str
    text: str


def git(*words: str) -> str:
    """Return git's output."""
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout  # noqa: S603, S607


def files_at(commit: str) -> Iterator[tuple[str, str]]:
    """Yield the path and the text of each file at `commit` that holds prose."""
    for path in git("ls-tree", "-r", "--name-only", commit).splitlines():
        if path.startswith(KEPT):
            continue
        if path.endswith(".md") or (path.startswith(CODE_FOLDERS) and path.endswith((".py", ".h", ".cc"))):
            yield path, git("show", f"{commit}:{path}")


def lines_of(path: str, text: str) -> Iterator[Line]:
    """Yield the prose of one file."""
    if path.endswith(".md"):
        yield from (Line("sentence", path, each) for each in sentences(text))
    elif path.endswith(".py"):
        yield from (Line("docstring", f"{path}:{number}", each) for number, each in docstrings(text))
        yield from (Line("comment", f"{path}:{number}", each) for number, each in python_comments(text))
        if path.startswith("src/"):
            yield from (Line("error", f"{path}:{number}", each) for number, each in errors(text))
    else:
        yield from (Line("comment", f"{path}:{number}", each) for number, each in native_comments(text))


def docstrings(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each docstring."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found = ast.get_docstring(node)
            if found:
                yield getattr(node, "lineno", 1), found


def python_comments(text: str) -> Iterator[tuple[int, str]]:
    """Yield each comment; consecutive comment lines count as one."""
    block: list[str] = []
    last, first = -1, 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT:
            continue
        own_line = not token.line[: token.start[1]].strip()
        if block and not (own_line and token.start[0] == last + 1):
            yield first, " ".join(block)
            block = []
        first = first if block else token.start[0]
        block.append(token.string.lstrip("#:! "))
        last = token.start[0] if own_line else -1
    if block:
        yield first, " ".join(block)


def is_prose(line: Line) -> bool:
    """Return whether `line` is prose.

    It is not prose if it is a directive for a tool, a ruler between sections, or very short.
    """
    return len(re.findall(r"[A-Za-z]{2,}", line.text)) >= 3 and not NO_PROSE.match(line.text)


def native_comments(text: str) -> Iterator[tuple[int, str]]:
    """Yield each comment of a C++ file; consecutive comment lines count as one."""
    block: list[str] = []
    first = 0
    for number, line in enumerate([*text.splitlines(), ""], 1):
        before, mark, comment = STRING.sub(lambda found: "_" * len(found[0]), line).partition("//")
        comment = line[len(line) - len(comment) :]
        if mark and not before.strip():
            first = first if block else number
            block.append(comment.strip())
            continue
        if block:
            yield first, " ".join(block)
            block = []
        if mark:
            yield number, comment.strip()


def errors(text: str) -> Iterator[tuple[int, str]]:
    """Yield the messages of a module's errors and warnings, with `{...}` for values."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and ERROR_NAMES.search(_name_of(node.func)) and node.args:
            found = _text_of(node.args[0])
            if len(found.split()) >= 3:
                yield node.lineno, found


def _name_of(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _text_of(node: ast.expr) -> str:
    match node:
        case ast.Constant(value=str(value)):
            return value
        case ast.JoinedStr(values=values):
            return "".join(_text_of(each) for each in values)
        case ast.FormattedValue(value=value):
            return f"{{{ast.unparse(value)}}}"
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _text_of(left) + _text_of(right)
    return ""


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a page, without code, headings and table headers."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    for paragraph in re.split(r"\n\s*\n", text):
        rows = [each for each in paragraph.splitlines() if not each.startswith(("#", "|--", "| --", "<", "!["))]
        if any(each.startswith("|") for each in rows):
            cells = [cell.strip() for row in rows[1:] if row.startswith("|") for cell in row.strip("|").split("|")]
            yield from (cell for cell in cells if len(cell.split()) >= 5)
            continue
        joined = " ".join(each.strip().removeprefix("- ") for each in rows)
        yield from (each.strip() for each in re.split(r"(?<=[.!?:])\s+(?=[A-Z`\[*])", joined) if len(each.split()) >= 4)


def planted() -> list[str]:
    """Return the lines that are known to be hard to read."""
    return [each for each in PLANTED.read_text("utf-8").splitlines() if each and not each.startswith("#")]


def draw(commit: str, folder: Path) -> None:
    """Write the sample of `commit` and its key to `folder`."""
    chance = random.Random(commit)  # noqa: S311 -- reproducible, not secret
    by_kind: dict[str, list[Line]] = {kind: [] for kind in COUNTS}
    for path, text in files_at(commit):
        for line in filter(is_prose, lines_of(path, text)):
            by_kind[line.kind].append(line)
    sample = [line for kind, count in COUNTS.items() for line in chance.sample(sorted(by_kind[kind], key=str), count)]
    sample += [Line("hidden", "", text) for text in chance.sample(planted(), HIDDEN)]
    chance.shuffle(sample)
    folder.mkdir(parents=True, exist_ok=True)
    shown = (f"{number}. {line.text}" for number, line in enumerate(sample, 1))
    (folder / "sample.txt").write_text("\n\n".join(shown) + "\n", encoding="utf-8")
    key = {
        "commit": commit,
        "of": {kind: len(each) for kind, each in by_kind.items()},
        "lines": [asdict(x) for x in sample],
    }
    (folder / "key.json").write_text(json.dumps(key, indent=1) + "\n", encoding="utf-8")
    print(f"{folder}: {len(sample)} lines, drawn from {key['of']}")


def judge(folder: Path, marks: list[Path]) -> int:
    """Print the marks of each reader; return the exit code."""
    lines = [Line(**each) for each in json.loads((folder / "key.json").read_text("utf-8"))["lines"]]
    counted = 0
    good = True
    for file in marks:
        marked = {int(each) for each in re.findall(r"\d+", file.read_text("utf-8"))}
        hidden = {number for number, line in enumerate(lines, 1) if line.kind == "hidden"}
        missed = len(hidden - marked)
        others = sorted(marked - hidden)
        share = len(others) / (len(lines) - len(hidden))
        counts = missed <= MISSES_ALLOWED
        counted += counts
        good = good and (not counts or share <= MARKED_ALLOWED)
        print(f"{file.name}: missed {missed} of {len(hidden)} hidden lines" + ("" if counts else ": does not count"))
        for kind, count in COUNTS.items():
            print(f"  {kind}: {sum(lines[each - 1].kind == kind for each in others)} of {count}")
        print(f"  all: {100 * share:.1f} in 100")
        for each in others:
            print(f"    {each}. {lines[each - 1].place}: {' '.join(lines[each - 1].text.split())[:160]}")
    return 0 if counted and good else 1


def main() -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    drawing = commands.add_parser("draw")
    drawing.add_argument("commit", nargs="?", default="HEAD")
    drawing.add_argument("--out", type=Path)
    judging = commands.add_parser("judge")
    judging.add_argument("folder", type=Path)
    judging.add_argument("marks", type=Path, nargs="+")
    arguments = parser.parse_args()
    if arguments.command == "judge":
        return judge(arguments.folder, arguments.marks)
    commit = git("rev-parse", arguments.commit).strip()
    draw(commit, arguments.out or ROOT / "build" / "prose" / commit[:12])
    return 0


if __name__ == "__main__":
    sys.exit(main())
