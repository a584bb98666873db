"""List the places that raise errors, and which of them the tests reach.

    python benchmarks/tools/reached_errors.py mark DIR     mark the sources of a separate checkout and build it
    make -C DIR test                                 each process notes the marks that it passes
    python benchmarks/tools/reached_errors.py list DIR > before.json
    python benchmarks/tools/reached_errors.py compare before.json after.json

In src/, a place is a call of a class whose name ends in Error, Exit, Interrupt or Exception, or a `raise` of another
named object. In native/, it is the kind in a call of Fault, fail() or throw_errno(). The text of a place is its
message, with `{}` for inserted values. `mark` changes the sources, so tests of the sources themselves (their sizes,
their names) may fail in DIR. Only the reached places count, not the passed tests.
"""

import argparse
import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

NAMES = re.compile(r"(Error|Exit|Interrupt|Exception|Unsupported)$")
NATIVE = re.compile(r"(?<![=!] )(?<!case )(?<!return )FaultKind::(?!none\b)[a-z_]+(?=\s*,)")
NATIVE_TEXT = re.compile(r'"((?:[^"\\]|\\.)*)"')
# Each process writes a line to this file when it first passes a mark. O_APPEND keeps each line whole.
PYTHON_NOTES = """
import builtins, os
_passed = set()
def multiring_reached(number, value):
    if (os.getpid(), number) not in _passed:
        _passed.add((os.getpid(), number))
        file = os.open({notes!r}, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        os.write(file, b"%d\\n" % number)
        os.close(file)
    return value
builtins.multiring_reached = multiring_reached
"""
NATIVE_NOTES = """
#pragma once
#include <fcntl.h>
#include <unistd.h>
#include <cstdio>
template <class Kind>
inline Kind multiring_reached(int number, Kind kind) {
  char line[16];
  const int length = std::snprintf(line, sizeof(line), "%%d\\n", number);
  const int file = open("%s", O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0666);
  if (file >= 0) {
    if (write(file, line, length) < 0) _exit(97);
    close(file);
  }
  return kind;
}
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Site:
    """A place in the sources that makes an error."""

    file: str
    line: int  # counted from 1, before the file was marked
    kind: str
    text: str


def text_of(node: ast.AST) -> str:
    """Return the text in an expression, with `{}` for inserted values."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.FormattedValue):
        return "{}"
    return "".join(text_of(child) for child in ast.iter_child_nodes(node) if not isinstance(child, ast.expr_context))


def python_sites(path: Path, name: str) -> Iterator[tuple[Site, ast.expr]]:
    """Yield each place of a file with the expression to mark."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        made = node.exc if isinstance(node, ast.Raise) else node
        if isinstance(made, ast.Call):
            kind = ast.unparse(made.func).rpartition(".")[2]
            # A raise of a function's result is a place too. A bare raise passes on an error that was counted before.
            if NAMES.search(kind) or isinstance(node, ast.Raise):
                text = "".join(text_of(each) for each in [*made.args, *(keyword.value for keyword in made.keywords)])
                yield Site(file=name, line=made.lineno, kind=kind, text=text), made
        elif isinstance(made, ast.Name) and isinstance(node, ast.Raise):
            kind = made.id if NAMES.search(made.id) else "raise"
            yield Site(file=name, line=made.lineno, kind=kind, text=""), made


def mark_python(path: Path, sites: list[Site], root: Path) -> None:
    """Wrap each place of a file in a call that records the place's number."""
    lines = path.read_bytes().splitlines(keepends=True)
    # the tree holds the same call twice: under the raise and as a call
    found = {
        (node.lineno, node.col_offset): (site, node) for site, node in python_sites(path, str(path.relative_to(root)))
    }
    inserts: list[tuple[int, int, int, bytes]] = []
    for (line, column), (site, node) in found.items():
        inserts.append((line, column, 1, b"multiring_reached(%d, " % len(sites)))
        inserts.append((node.end_lineno or 0, node.end_col_offset or 0, 0, b")"))
        sites.append(site)
    # Insert from the end, so the columns stay valid. If one place ends where another begins, the closing comes first.
    for line, column, _, new in sorted(inserts, reverse=True):
        old = lines[line - 1]
        lines[line - 1] = old[:column] + new + old[column:]
    path.write_bytes(b"".join(lines))
    compile(path.read_bytes(), path, "exec")


def mark_native(path: Path, sites: list[Site], root: Path, header: Path) -> None:
    """Wrap each kind of a fault in a C++ file in a call that records its number."""
    text = path.read_text(encoding="utf-8")
    pieces, end = [f'#include "{header}"\n'], 0
    for at in NATIVE.finditer(text):
        number = text.count("\n", 0, at.start()) + 1
        # The message's text ends where the statement ends.
        said = "{}".join(NATIVE_TEXT.findall(text[at.end() : text.find(";", at.end())]))
        pieces += [text[end : at.start()], f"::multiring_reached({len(sites)}, {at[0]})"]
        sites.append(Site(file=str(path.relative_to(root)), line=number, kind=at[0], text=said))
        end = at.end()
    if end:
        path.write_text("".join([*pieces, text[end:]]), encoding="utf-8")


def mark(checkout: Path) -> None:
    """Mark all sources of `checkout` and build it."""
    build = checkout / "build"
    build.mkdir(exist_ok=True)
    notes, header = build / "reached.txt", build / "reached.h"
    sites: list[Site] = []
    for path in sorted((checkout / "src").rglob("*.py")):
        mark_python(path, sites, checkout)
    header.write_text(NATIVE_NOTES % notes, encoding="utf-8")
    for folder in ("core", "bind", "jax", "tensorflow"):
        for path in sorted((checkout / "native" / folder).rglob("*.cc")) + sorted(
            (checkout / "native" / folder).rglob("*.h")
        ):
            mark_native(path, sites, checkout, header)
    (build / "sites.json").write_text(json.dumps([asdict(site) for site in sites], indent=1), encoding="utf-8")
    subprocess.run(["/usr/bin/env", "make", "build"], cwd=checkout, check=True)
    python = checkout / ".venv" / "bin" / "python"
    place = subprocess.run(  # noqa: S603 -- the checkout's own Python
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True,
        text=True,
        check=True,
    )
    packages = Path(place.stdout.strip())
    (packages / "multiring_reached.py").write_text(PYTHON_NOTES.format(notes=str(notes)), encoding="utf-8")
    (packages / "0-multiring-reached.pth").write_text("import multiring_reached\n", encoding="utf-8")
    notes.unlink(missing_ok=True)  # drop the marks that the build passed


def listed(checkout: Path) -> list[dict[str, object]]:
    """Return each place of a marked checkout, and whether it was reached."""
    sites = json.loads((checkout / "build" / "sites.json").read_text())
    passed = {int(line) for line in (checkout / "build" / "reached.txt").read_text().split()}
    return [{**site, "reached": number in passed} for number, site in enumerate(sites)]


def compare(before: Path, after: Path) -> int:
    """Print the errors that were reached before but not after.

    Returns:
        The number of these errors that the code can still make.
    """
    sides = [json.loads(path.read_text()) for path in (before, after)]
    reached = [{(site["kind"], site["text"]) for site in side if site["reached"]} for side in sides]
    made = [{(site["kind"], site["text"]) for site in side} for side in sides]
    for name, side, keys, passed in zip(("before", "after"), sides, made, reached, strict=True):
        places = sum(site["reached"] for site in side)
        print(f"{name:6} {places:5} of {len(side):5} places reached, {len(passed):5} of {len(keys):5} kinds with text")
    lost = sorted(reached[0] - reached[1])
    for title, some in (
        ("reached before, there and not reached now", [key for key in lost if key in made[1]]),
        ("reached before, not there now", [key for key in lost if key not in made[1]]),
    ):
        print(f"\n{title}: {len(some)}")
        for kind, text in some:
            print(f"  {kind}: {text!r}")
    return sum(key in made[1] for key in lost)


def main() -> None:
    """Mark, list or compare, as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["mark", "list", "compare"])
    parser.add_argument("paths", nargs="+", type=Path)
    options = parser.parse_args()
    if options.action == "mark":
        mark(options.paths[0].resolve())
    elif options.action == "list":
        print(json.dumps(listed(options.paths[0].resolve()), indent=1))
    else:
        sys.exit(compare(*options.paths) != 0)


if __name__ == "__main__":
    main()
