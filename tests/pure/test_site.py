"""The pages of docs contain every setting and every public name, and their links have targets."""

import ast
import importlib.util
import re
from dataclasses import fields
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

import multiring
from multiring._cli import main
from multiring._cli.settings import default_of, page
from multiring._foreign_variables import FOREIGN_VARIABLES
from multiring._settings import HOROVOD_READ, Settings

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.rglob("*.md"))]
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")
FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
INLINE = re.compile(r"`+[^`]*`+")


def test_every_setting_is_in_its_page(capsys: pytest.CaptureFixture[str]) -> None:
    text = (DOCS / "settings.md").read_text()
    assert "\n".join(page()) + "\n" == text, "docs/settings.md is stale; run: make site"
    rows = {line.split(" | ")[0].strip("| `"): line.strip("| ").split(" | ") for line in text.splitlines()}
    for setting in fields(Settings):
        _, value, default, meaning = rows[setting.metadata["name"]]
        assert value
        assert meaning
        assert default == (default_of(setting) or "none")
        if setting.default is not None:  # the documented default parses to the default
            told = Settings.from_environment({setting.metadata["name"]: default})
            assert getattr(told, setting.name) == setting.default
    assert all(name in text for name in (*HOROVOD_READ, *FOREIGN_VARIABLES))
    assert main(["settings"]) == 0
    shown = capsys.readouterr().out
    assert all(setting.metadata["name"] in shown for setting in fields(Settings))


def test_settings_show_what_is_set_here(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MULTIRING_STALL_WARN_S", "7")
    monkeypatch.setenv("MULTIRING_SECRET", "nobody is to see it")
    assert main(["settings"]) == 0
    shown = capsys.readouterr().out
    assert "MULTIRING_STALL_WARN_S = 7 (set here)\n" in shown
    assert "MULTIRING_SECRET = *** (set here)\n" in shown
    assert "nobody" not in shown
    monkeypatch.setenv("MULTIRING_STALL_WARN_S", "soon")
    assert main(["settings"]) == 2


def hooks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("site_hooks", DOCS / "site" / "hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def module_file(module: str) -> Path:
    place = ROOT / "src" / Path(*module.split("."))
    return place / "__init__.py" if place.is_dir() else place.with_suffix(".py")


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def documentation_of(module: str, name: str) -> str | None:
    """Return the docstring of a public name from the source: of a function, a class or a constant."""
    body = parsed(module_file(module)).body
    made = [each for each in body if isinstance(each, ast.FunctionDef | ast.ClassDef) and each.name == name]
    if made:
        return ast.get_docstring(made[-1])  # the last definition, after any overloads
    for at, node in enumerate(body):
        inner = node.body if isinstance(node, ast.If) else [node]  # imports for type checkers
        for each in inner:
            if isinstance(each, ast.ImportFrom) and str(each.module).startswith("multiring"):
                for alias in each.names:
                    if (alias.asname or alias.name) == name:
                        return imported(str(each.module), alias.name)
            targets = each.targets if isinstance(each, ast.Assign) else [getattr(each, "target", None)]
            if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                below = body[at + 1]
                is_text = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
                return str(below.value.value) if is_text else None  # type: ignore[attr-defined] # see above
    raise AssertionError(f"{module} has no {name}")


def imported(module: str, name: str) -> str | None:
    inner = module_file(f"{module}.{name}")
    return ast.get_docstring(parsed(inner)) if inner.exists() else documentation_of(module, name)


def test_every_public_name_has_a_docstring_and_stands_in_the_reference() -> None:
    site = hooks()
    told = (ROOT / "mkdocs.yml").read_text()
    for module in site.MODULES:
        names = site.public_names(module)
        text = site.reference_page(module)
        assert f"reference/{module}.md" in told
        assert len(names) > 3, module
        for name in names:
            assert f"::: {module}.{name}\n" in text
            assert documentation_of(module, name), f"{module}.{name} has no docstring"


def test_the_menu_names_each_page_once() -> None:
    entries = re.findall(r"^      - (\S+)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(entries) > 30
    assert len(entries) == len(set(entries)), sorted(each for each in entries if entries.count(each) > 1)


def test_the_site_has_every_page() -> None:
    told = (ROOT / "mkdocs.yml").read_text()
    for path in DOCS.glob("*.md"):
        assert f"      - {path.name}\n" in told, f"{path.name} is not in mkdocs.yml's contents"


@pytest.mark.parametrize("path", PAGES, ids=[str(path.relative_to(ROOT)) for path in PAGES])
def test_links_lead_somewhere(path: Path) -> None:
    text = INLINE.sub("", FENCE.sub("", path.read_text()))
    for target, anchor in LINK.findall(text):
        leads_to = (path.parent / target).resolve() if target else path
        assert leads_to.exists(), f"{target} does not exist"
        if anchor and leads_to.suffix == ".md" and leads_to.exists():
            titles = re.findall(r"^#+ (.+)$", leads_to.read_text(), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}, anchor


def test_a_module_lists_its_interface_only() -> None:
    assert dir(multiring) == sorted(multiring.__all__)
