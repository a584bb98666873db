"""Orderings of streams in the sources: which there are, and how a test leaves one out.

An ordering is a call that makes a stream or the host wait, or that keeps memory until a stream is done with it. A site
names one: file, function and call, as in "torch/c10d/staged.py StagedWork.wait: stream.wait_event".
"""

import ast
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

SOURCES = Path(__file__).parents[2] / "src" / "multiring"
FILES = (
    "torch/**/*.py",
    "_frontend/submission_line.py",
    "_runtime/engines/nccl*.py",
    "_runtime/engines/cuda*.py",
    "_runtime/engines/pinned_memory.py",
    "_runtime/engines/staged.py",
    "_runtime/engines/dlpack.py",
)
METHODS = {
    "wait_event",
    "wait_stream",
    "wait_on",
    "record",
    "record_event",
    "record_stream",
    "synchronize",
    "note",
    "query",
    "has_happened",
    "is_quiet",
}
# Functions of the driver, which the engine calls by name.
DRIVER_CALLS = {"cuStreamWaitEvent", "cuEventRecord", "cuStreamSynchronize", "cuEventQuery", "cuEventSynchronize"}


@dataclass(frozen=True, slots=True)
class Place:
    """Where the call of a site is."""

    file: Path
    function: str  # its own name
    first_line: int
    last_line: int


@cache
def sites() -> dict[str, list[Place]]:
    """Return the places of each site in the sources. Equal calls in one function share a site."""
    found: dict[str, list[Place]] = {}
    for pattern in FILES:
        for file in sorted(SOURCES.glob(pattern)):
            for owner, node in _nodes(ast.parse(file.read_text(encoding="utf-8")), ""):
                if (name := _ordering(node)) is not None:
                    key = f"{file.relative_to(SOURCES)} {owner}: {name}"
                    lines: Any = node
                    place = Place(file, owner.rpartition(".")[2], lines.lineno, lines.end_lineno)
                    found.setdefault(key, []).append(place)
    return found


def _nodes(node: ast.AST, owner: str) -> Iterator[tuple[str, ast.AST]]:
    for child in ast.iter_child_nodes(node):
        inner = owner
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            inner = f"{owner}.{child.name}" if owner else child.name
        yield owner, child
        yield from _nodes(child, inner)


def _ordering(node: ast.AST) -> str | None:
    """Return the name of the ordering that the node calls or passes on, or None if it is none."""
    if isinstance(node, ast.Attribute) and node.attr in METHODS:
        on, is_computed = node.value, isinstance(node.value, ast.Call)
        # A receiver that is computed is named by its function, such as current_stream.
        while isinstance(on, ast.Call):
            on = on.func
        return f"{on.attr if is_computed and isinstance(on, ast.Attribute) else ast.unparse(on)}.{node.attr}"
    if isinstance(node, ast.Call):
        if isinstance(node.func, ast.Name) and node.func.id == "record_use":
            return f"record_use({ast.unparse(node.args[0])})"
        if isinstance(node.func, ast.Attribute) and node.func.attr == "order":  # of a handle; an attribute is no call
            return f"{ast.unparse(node.func.value)}.order"
        constants = [*ast.walk(node.func), *node.args[:1]]
        texts = {each.value for each in constants if isinstance(each, ast.Constant)}
        return next((each for each in sorted(DRIVER_CALLS) if each in texts), None)
    return None


def without(original: Callable[..., Any], *left_out: str, instead: Any = None) -> Callable[..., Any]:
    """Return `original`, changed to do nothing and return `instead` where it is called at the sites `left_out`."""
    places = [place for site in left_out for place in sites()[site]]

    def changed(*arguments: Any, **options: Any) -> Any:
        frame = sys._getframe(1)
        for place in places:
            is_here = frame.f_code.co_name == place.function and frame.f_code.co_filename == str(place.file)
            if is_here and place.first_line <= frame.f_lineno <= place.last_line:
                return instead
        return original(*arguments, **options)

    return changed
