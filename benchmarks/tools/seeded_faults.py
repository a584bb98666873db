"""Seed faults into the source one at a time to see whether the tests catch them.

    python benchmarks/tools/seeded_faults.py draw > benchmarks/results/seeded_faults.json
    python benchmarks/tools/seeded_faults.py run benchmarks/results/seeded_faults.json --checkout DIR [--tests FILE ...]

`draw` takes 100 of all small changes that are possible in src/multiring and native/core. A change turns a comparison
into its neighbour, increments a number, negates a condition, leaves out a statement, or swaps `and` and `or`. The two
folders get faults in proportion to their lines. The draw depends only on the seed and the sources, not on the results
of tests. So two test suites can be compared on the same faults.

`run` applies one fault after the other in DIR, a checkout with its own .venv and no other users. For each fault, pytest
runs the given tests until the first failure; then the fault is reverted. A fault in native/ is compiled by `make build`
first. The result of each fault is one line of JSON. A time-out counts as caught, as pytest would report it.
"""

import argparse
import ast
import json
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
SEED, COUNT = 20261124, 100
NEIGHBOUR = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "is": "is not", "in": "not in"}
NEIGHBOUR |= {"is not": "is", "not in": "in"}
PYTHON_COMPARISON = re.compile(r"\s(<=|>=|==|!=|<|>|is not|not in|is|in)\s")
NATIVE_COMPARISON = re.compile(r" (<=|>=|==|!=|<|>) ")
NATIVE_NUMBER = re.compile(r"(?<![\w.\"'])(\d+)(?![\w.\"'])")
NATIVE_CONDITION = re.compile(r"^(\s*(?:\} else )?if \()(.*)(\) (?:\{|return\b.*;|continue;|break;))$")
NATIVE_STATEMENT = re.compile(
    r"^\s+(?!return\b|using\b|throw\b|case\b|delete\b)[a-z_][\w.>\-\[\]]*(\(.*\)| [+|&-]?= .*);$"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """A change of one line of the source."""

    file: str
    line: int  # counted from 1
    kind: str
    before: str
    after: str


def python_faults(path: Path) -> Iterator[Fault]:
    """Yield every possible one-line fault of a Python file, except conditions."""
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        line = getattr(node, "lineno", 0)
        # a node with a first line also has a last line
        if not line or node.end_lineno != line:  # type: ignore[attr-defined]
            continue
        old = lines[line - 1]
        # Columns are counted in bytes. Lines with other characters than ASCII are left out.
        if not old.isascii():
            continue
        for kind, start, end, new in python_changes(node, old):
            changed = old[:start] + new + old[end:]
            yield Fault(file=str(path.relative_to(ROOT)), line=line, kind=kind, before=old, after=changed)


def python_changes(node: ast.AST, line: str) -> Iterator[tuple[str, int, int, str]]:
    """Yield the changes of a node: kind, first column, end column and new text."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        start, end = node.left.end_col_offset or 0, node.comparators[0].col_offset
        found = PYTHON_COMPARISON.fullmatch(line[start:end])
        if found:
            yield "comparison", start, end, f" {NEIGHBOUR[found[1]]} "
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        yield "constant", node.col_offset, node.end_col_offset or 0, str(node.value + 1)
    elif isinstance(node, ast.BoolOp):
        old, new = (" and ", " or ") if isinstance(node.op, ast.And) else (" or ", " and ")
        end, start = node.values[1].col_offset, node.values[0].end_col_offset or 0
        if line[start:end] == old:
            yield "and for or", start, end, new
    elif isinstance(node, (ast.Expr, ast.Assign, ast.AugAssign)):
        is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if node.col_offset and not is_docstring and line[: node.col_offset].isspace():
            yield "statement", node.col_offset, node.end_col_offset or 0, "pass"


def python_conditions(path: Path) -> Iterator[Fault]:
    """Yield the negation of every one-line condition in a Python file."""
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.If, ast.While)) and node.test.lineno == node.test.end_lineno:
            old = lines[node.test.lineno - 1]
            start, end = node.test.col_offset, node.test.end_col_offset or 0
            changed = f"{old[:start]}not ({old[start:end]}){old[end:]}"
            if old.isascii():
                file = str(path.relative_to(ROOT))
                yield Fault(file=file, line=node.test.lineno, kind="condition", before=old, after=changed)


def native_faults(path: Path) -> Iterator[Fault]:
    """Yield every possible one-line fault of a C++ file."""
    for number, old in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        code = old.partition("//")[0].rstrip()
        if not code or code.lstrip().startswith(("#", "*", "/*")) or '"' in code or "template" in code:
            continue
        changes = [("comparison", at, NEIGHBOUR[at[1]]) for at in NATIVE_COMPARISON.finditer(code)]
        changes += [("constant", at, str(int(at[1]) + 1)) for at in NATIVE_NUMBER.finditer(code)]
        changed = [(kind, code[: at.start(1)] + new + code[at.end(1) :]) for kind, at, new in changes]
        condition = NATIVE_CONDITION.match(code)
        if condition:
            changed.append(("condition", f"{condition[1]}!({condition[2]}){condition[3]}"))
        if NATIVE_STATEMENT.match(code):
            changed.append(("statement", ""))
        for kind, new in changed:
            yield Fault(file=str(path.relative_to(ROOT)), line=number, kind=kind, before=old, after=new)


def draw() -> list[Fault]:
    """Return the faults in a random order, so any first n of them are a sample too."""
    python = sorted((ROOT / "src" / "multiring").rglob("*.py"))
    native = sorted((ROOT / "native" / "core").rglob("*.cc"))
    lines = [sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths) for paths in (python, native)]
    found = [fault for path in python for some in (python_faults, python_conditions) for fault in some(path)]
    compiled = [fault for path in native for fault in native_faults(path)]
    chosen = random.Random(SEED)  # noqa: S311 -- a sample, no secret
    count = round(COUNT * lines[0] / sum(lines))
    # Lines have different numbers of each kind, and constants would dominate. So the kind is drawn first.
    faults = [_one_of(some, chosen) for some, n in ((found, count), (compiled, COUNT - count)) for _ in range(n)]
    chosen.shuffle(faults)
    return faults


def _one_of(faults: list[Fault], chosen: random.Random) -> Fault:
    kind = chosen.choice(sorted({fault.kind for fault in faults}))
    return chosen.choice([fault for fault in faults if fault.kind == kind])


def is_caught(fault: Fault, checkout: Path, tests: list[str], timeout_s: float) -> dict[str, object]:
    """Apply the fault, run the tests, and return their result.

    Raises:
        SystemExit: The line differs from the fault's, because the checkout has another commit.
    """
    path = checkout / fault.file
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines(keepends=True)
    if lines[fault.line - 1].rstrip("\n") != fault.before:
        sys.exit(f"{path}:{fault.line} is {lines[fault.line - 1]!r}, not {fault.before!r}")
    lines[fault.line - 1] = fault.after + "\n"
    try:
        path.write_text("".join(lines), encoding="utf-8")
        if path.suffix == ".cc":
            made = subprocess.run(["/usr/bin/env", "make", "build"], cwd=checkout, check=False, capture_output=True)
            if made.returncode:
                return {"caught": True, "by": "the compiler"}
        python = str(checkout / ".venv" / "bin" / "python")
        command = [python, "-m", "pytest", "-x", "-q", "--no-header", "--durations=0", "-p", "no:cacheprovider", *tests]
        done = subprocess.run(  # noqa: S603 -- pytest
            command, cwd=checkout, timeout=timeout_s, capture_output=True, text=True, check=False
        )
        by = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
        return {"caught": done.returncode != 0, "by": by[0] if by else f"exit code {done.returncode}"}
    except subprocess.TimeoutExpired:
        return {"caught": True, "by": "the time-out"}
    finally:
        path.write_text(text, encoding="utf-8")


def main() -> None:
    """Draw faults, or run them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["draw", "run"])
    parser.add_argument("faults", nargs="?", type=Path, help="file with the output of `draw`")
    parser.add_argument("--checkout", type=Path, help="checkout to change; its sources must be those of `draw`")
    parser.add_argument("--tests", nargs="*", default=["tests"])
    parser.add_argument("--only", nargs="*", type=int, help="numbers of the faults to run, from 0 (default: all)")
    parser.add_argument("--timeout-s", type=float, default=1800)
    options = parser.parse_args()
    if options.action == "draw":
        print(json.dumps([asdict(fault) for fault in draw()], indent=1))
        return
    faults = [Fault(**each) for each in json.loads(options.faults.read_text())]
    for number in options.only if options.only is not None else range(len(faults)):
        found = is_caught(faults[number], options.checkout.resolve(), options.tests, options.timeout_s)
        print(json.dumps({"fault": number, **found}), flush=True)


if __name__ == "__main__":
    main()
