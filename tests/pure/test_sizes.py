"""Files, classes and parameter lists stay small enough to read at once (docs/decisions/0041)."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Docstrings of Python code do not count: a complete Args and Raises must not cost a place in the file.
MOST_LINES, MOST_PYTHON_LINES, MOST_OF_A_CLASS, MOST_PARAMETERS = 500, 430, 286, 8
PYTHON = sorted((ROOT / "src").rglob("*.py"))
# Horovod's own signatures, on which user programs depend; and `distribute`, of whose options a script for one process
# gives none.
WIDE = {
    "horovod/onpath/horovod/keras/__init__.py::DistributedOptimizer",
    "horovod/ray_executor.py::__init__",
    "horovod/spark_running.py::run",
    "spark/keras_estimator.py::__init__",
    "spark/torch_estimator.py::__init__",
    "horovod/running.py::run",
    "keras/optimizer.py::DistributedOptimizer",
    "keras/optimizer.py::PartialDistributedOptimizer",
    "tensorflow/collectives.py::allreduce",
    "tensorflow/collectives.py::grouped_allreduce",
    "tensorflow/collectives.py::reducescatter",
    "tensorflow/gradient_tape.py::DistributedGradientTape",
    "tensorflow/gradient_tape.py::PartialDistributedGradientTape",
    "tensorflow/optimizer.py::DistributedOptimizer",
    "torch/distributing/preparing.py::distribute",
    "torch/gradients/optimizer.py::DistributedOptimizer",
    "trials/population.py::run_population",
    "trials/running.py::run",
}


def docstring_lines(tree: ast.AST) -> int:
    """Return how many lines the docstrings in `tree` take."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    bodies = [each.body for each in ast.walk(tree) if isinstance(each, kinds) and ast.get_docstring(each) is not None]
    return sum((body[0].end_lineno or 0) - body[0].lineno + 1 for body in bodies)


def long_classes(tree: ast.AST) -> Iterator[str]:
    """Yield the classes that are too long."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            lines = (node.end_lineno or 0) - node.lineno + 1
            if lines - docstring_lines(node) > MOST_OF_A_CLASS:
                yield node.name


def wide_functions(tree: ast.AST) -> Iterator[str]:
    """Yield the functions with too many parameters, without `self` and `cls`. A record's fields do not count."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names = [each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            if len(names) - (names[:1] in (["self"], ["cls"])) > MOST_PARAMETERS:
                yield node.name


def test_files_are_short() -> None:
    native = [path for path in (ROOT / "native").rglob("*") if path.suffix in {".cc", ".h"}]
    assert len(PYTHON) > 300
    assert len(native) > 50
    lines = {path: path.read_text("utf-8").count("\n") for path in native}
    assert not {str(path.relative_to(ROOT)): count for path, count in lines.items() if count > MOST_LINES}
    texts = {path: path.read_text("utf-8") for path in PYTHON}
    code = {path: text.count("\n") - docstring_lines(ast.parse(text)) for path, text in texts.items()}
    assert not {str(path.relative_to(ROOT)): count for path, count in code.items() if count > MOST_PYTHON_LINES}


@pytest.mark.parametrize("folder", sorted({path.relative_to(ROOT).parts[2] for path in PYTHON if len(path.parts) > 3}))
def test_classes_and_signatures_are_short(folder: str) -> None:
    top = ROOT / "src" / "multiring" / folder
    for path in [top] if top.suffix == ".py" else top.rglob("*.py"):
        tree = ast.parse(path.read_text("utf-8"))
        assert not list(long_classes(tree)), path
        name = str(path.relative_to(ROOT / "src" / "multiring"))
        assert {f"{name}::{each}" for each in wide_functions(tree)} <= WIDE


def test_the_wide_signatures_are_there() -> None:
    for each in WIDE:
        file, _, name = each.partition("::")
        assert name in wide_functions(ast.parse((ROOT / "src" / "multiring" / file).read_text("utf-8")))


def test_what_is_too_long_is_found() -> None:
    body = "\n".join(['    """Say what it is."""', *["    x = 1"] * MOST_OF_A_CLASS])
    assert list(long_classes(ast.parse(f"class Long:\n{body}\nclass Short:\n    x = 1\n"))) == ["Long"]
    many = ", ".join("abcdefgh")
    text = f"class A:\n    def f(self, {many}): ...\n    def g(self, {many}, *, i): ...\ndef h({many}, i): ...\n"
    assert sorted(wide_functions(ast.parse(text))) == ["g", "h"]
