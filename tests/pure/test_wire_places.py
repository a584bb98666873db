"""A wire type is written down in few places: everything else takes the types from a table."""

import ast
import re
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest

from multiring._schedule import WIRES

ROOT = Path(__file__).parents[2]
WIRE = re.compile(
    r"\b(?:fp16|bf16)\b.*\b(?:fp16|bf16|int8)\b|^(?:fp16|bf16)$|\bWire(?:\.|::)(?:fp16|bf16|int8|FP16|BF16|INT8)\b",
    re.DOTALL,
)
MIGHT = re.compile("fp16|bf16|int8", re.IGNORECASE)  # without it, a file need not be parsed
TABLES = {
    "src/multiring/_schedule/kinds.py",
    "src/multiring/_schedule/wire.py",
    "native/core/kernels/codec.h",
    "native/core/kernels/codec_kernels.h",
}
# The members of Compression for type checkers, with the classes that Horovod has. Other wire types are added by a loop.
MEMBERS = {
    "src/multiring/torch/compression.py",
    "src/multiring/tensorflow/compression.py",
    "src/multiring/_frontend/compression_names.py",
}
# Here the names are element types of a model's arithmetic, or the only wire type that Chainer has.
ELEMENTS = {
    "src/multiring/chainer/distributing.py",
    "src/multiring/chainer/communicator.py",
    "src/multiring/torch/reporting/share_of_peak.py",
    "src/multiring/torch/step/precision.py",
    "src/multiring/training/options.py",
    "src/multiring/training/recipe.py",
}


def python_texts(text: str) -> Iterator[str]:
    """Yield the strings of a program, and its `Wire.NAME`."""
    tree = ast.parse(text)
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.value
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            yield f"{node.value.id}.{node.attr}"
        elif isinstance(node, ast.ClassDef):  # the members of an enumeration
            yield from (f"{node.name}.{name.id}" for name in ast.walk(node) if isinstance(name, ast.Name))


def native_texts(text: str) -> Iterator[str]:
    """Yield the code of each line."""
    yield from (line.partition("//")[0] for line in re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL).splitlines())


def places() -> set[str]:
    """Return the files whose code names a wire type."""
    found = set()
    for folder, pattern, texts in (
        ("src", "*.py", python_texts),
        ("native", "*.h", native_texts),
        ("native", "*.cc", native_texts),
    ):
        for path in (ROOT / folder).rglob(pattern):
            name, text = str(path.relative_to(ROOT)), path.read_text("utf-8")
            might = MIGHT.search(text) and not name.startswith("native/tests/")
            if might and any(map(WIRE.search, texts(text))):
                found.add(name)
    return found


def test_wire_types_are_named_in_the_tables_only() -> None:
    assert places() - MEMBERS - ELEMENTS == TABLES


def test_names_are_found() -> None:
    text = (
        '"""fp16 and bf16."""\nx = "bf16"\ny = Wire.INT8\nz = f"want fp16, {x} or int8"\nkinds = ["float16", "int8"]\n'
    )
    assert [each for each in python_texts(text) if WIRE.search(each)] == ["bf16", "Wire.INT8"]
    assert [each for each in native_texts("// fp16, bf16\nif (wire == Wire::int8)\n") if WIRE.search(each)]


def test_a_new_wire_type_is_a_member_of_compression_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("multiring._schedule.WIRES", (*WIRES, "fp24"))
    names = runpy.run_path(str(ROOT / "src/multiring/_frontend/compression_names.py"))
    assert names["wire_of"]("fp24") == names["wire_of"](names["Compression"].fp24) == "fp24"
    assert [each for each in vars(names["Compression"]) if not each.startswith("_")] == ["none", *WIRES, "fp24"]
