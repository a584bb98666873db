"""Count the lines of code of src, native and examples at commits.

A line counts if it holds code: blank lines, comments and docstrings do not count. Without a commit,
the program counts the files of the working tree that git tracks. It always exits with 0.

    python benchmarks/tools/lines_of_code.py
    python benchmarks/tools/lines_of_code.py db571b8 HEAD
"""

import argparse
import ast
import io
import re
import subprocess
import tokenize
from collections import Counter
from pathlib import Path

FOLDERS = ("src", "native", "examples")
NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
# Literals go first, so that a comment's sign within one counts as code.
NATIVE_PIECES = re.compile(r'"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|//[^\n]*|/\*.*?\*/', re.DOTALL)


def python_lines(text: str) -> int:
    """Return how many lines of Python source `text` hold code."""
    lines = set[int]()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and node.body:
            first = node.body[0]
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                lines.difference_update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return len(lines)


def native_lines(text: str) -> int:
    """Return how many lines of C++ source `text` hold code."""

    def without_comment(piece: "re.Match[str]") -> str:
        text = piece[0]
        return "\n" * text.count("\n") if text.startswith("/") else text

    return sum(1 for line in NATIVE_PIECES.sub(without_comment, text).splitlines() if line.strip())


LANGUAGES = {".py": python_lines, ".h": native_lines, ".cc": native_lines}


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], check=True, capture_output=True, text=True).stdout  # noqa: S603, S607


def count(commit: str | None) -> Counter[str]:
    """Return the lines of code of each folder at `commit`, or of git's files in the working tree."""
    listing = ["ls-tree", "-r", "--name-only", commit] if commit else ["ls-files"]
    lines = Counter[str]()
    for name in _git(*listing, "--", *FOLDERS).splitlines():
        counted = LANGUAGES.get(Path(name).suffix)
        if counted and (commit or Path(name).exists()):
            text = _git("show", f"{commit}:{name}") if commit else Path(name).read_text(encoding="utf-8")
            lines[name.split("/")[0]] += counted(text)
    return lines


def main() -> None:
    """Print a row for each commit."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("commits", nargs="*", metavar="COMMIT", help="commits to count (default: the working tree)")
    print(f"{'':<24}" + "".join(f"{name:>10}" for name in (*FOLDERS, "all")))
    for commit in parser.parse_args().commits or [None]:
        lines = count(commit)
        cells = (*(lines[folder] for folder in FOLDERS), sum(lines.values()))
        print(f"{commit or 'working tree':<24}" + "".join(f"{cell:>10,}" for cell in cells))


if __name__ == "__main__":
    main()
