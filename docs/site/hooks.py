"""What the site has beyond the pages of docs: the reference, made of the public names' docstrings."""

import ast
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
# Of each, what stands in `__all__`, or else its classes, and what it hands on by `import x as x`.
MODULES = {
    "multiring": "Ranks and groups",
    "multiring.torch": "PyTorch",
    "multiring.torch.elastic": "PyTorch: going on after a failure",
    "multiring.tensorflow": "TensorFlow",
    "multiring.keras": "Keras",
    "multiring.jax": "JAX",
    "multiring.caffe": "Caffe",
    "multiring.data": "Data sets",
    "multiring.adapters": "Parts of an adapter",
    "multiring.adapters.conformance": "Checks of an adapter",
    "multiring.adapters.elastic": "Parts of an adapter: elastic training",
    "multiring.convergence": "Large batches: noise scale and schedules",
    "multiring.training": "A training loop for PyTorch",
    "multiring.vision": "Labelled pictures",
    "multiring.errors": "Errors",
}
_OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./(?:\.\./)*(?!\w+\.md)[^)]*\)")


def public_names(module: str) -> list[str]:
    """Return the names that a module offers, by its text: no framework has to be there."""
    place = ROOT / "src" / Path(*module.split("."))
    path = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            return [name for name in ast.literal_eval(node.value) if not name.startswith("__")]
    made = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
    return made + [
        each.asname for node in tree.body if isinstance(node, ast.ImportFrom) for each in node.names if each.asname
    ]


def reference_page(module: str) -> str:
    """Return the page of a module: each public name with its docstring."""
    names = public_names(module)
    first, rest = [each for each in names if each[0].isupper()], [each for each in names if not each[0].isupper()]
    entries = [f"::: {module}.{name}\n" for name in [*sorted(rest, key=str.lower), *sorted(first)]]
    return "\n".join([f"# {MODULES[module]}: `{module}`", "", *entries])


def on_config(config: Any) -> Any:
    """List the decisions in the site's contents."""
    for section in config["nav"]:
        for name, pages in section.items():
            if "decisions" in pages:
                names = {path.name for path in (ROOT / "docs" / "decisions").glob("*.md")}
                found = ["README.md", *sorted(names - {"README.md"})]  # the index comes first
                pages[pages.index("decisions")] = {"Decisions": [f"decisions/{each}" for each in found]}
                assert name == "Inside"  # noqa: S101 -- away from the users' pages
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the reference's pages."""
    from mkdocs.structure.files import File  # noqa: PLC0415 -- the tests read this file without it

    for module in MODULES:
        files.append(File.generated(config, f"reference/{module}.md", content=reference_page(module)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Leave the text alone of links that lead out of docs: the site is read without the repository."""
    return _OUTSIDE.sub(lambda match: _named(match[1]), markdown)


def _named(text: str) -> str:
    return text if text.startswith("`") else f"`{text}`" if "/" in text else text
