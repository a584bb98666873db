"""Former names of public packages raise an error with the current name, also in an import statement."""

import importlib.util
from pathlib import Path

import pytest

from multiring._former_names import FORMER, FORMER_MODULES

NAMES = [(owner, old, new) for owner, names in FORMER.items() for old, new in names.items()]
PACKAGES = [each for each in NAMES if each[0].startswith("multiring")]


@pytest.mark.parametrize(("package", "old", "new"), PACKAGES)
def test_a_former_name_says_the_current_name(package: str, old: str, new: str) -> None:
    framework = package.removeprefix("multiring.")
    if framework in {"caffe", "jax", "tensorflow", "torch"} and importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")
    module = importlib.import_module(package)
    assert hasattr(module, new)
    assert not hasattr(module, old)
    said = f"{package}.{old} is now {package}.{new}: use the new name"
    with pytest.raises(AttributeError) as by_attribute:
        getattr(module, old)
    assert str(by_attribute.value) == said
    with pytest.raises(ImportError) as by_import:
        exec(f"from {package} import {old}")  # noqa: S102 -- the statement that a program has
    assert str(by_import.value) == said


@pytest.mark.parametrize(("old", "new"), FORMER_MODULES.items())
def test_a_former_module_says_the_current_one(old: str, new: str) -> None:
    assert importlib.util.find_spec(new) is not None
    package, _, name = old.rpartition(".")
    for statement in (f"import {old}", f"from {package} import {name}", f"from {old} import anything"):
        with pytest.raises(ImportError) as told:
            exec(statement)  # noqa: S102 -- the statement that a program has
        assert str(told.value) == f"{old} is now {new}: use the new name"
    if package == "multiring":
        with pytest.raises(AttributeError, match=f"{old} is now {new}: use the new name"):
            getattr(importlib.import_module(package), name)


def test_a_module_at_each_former_place_refuses() -> None:
    source = Path(__file__).parents[2] / "src"
    calling = {path for path in source.rglob("*.py") if "refuse_module(__name__)" in path.read_text(encoding="utf-8")}
    assert calling == {source.joinpath(*old.split(".")).with_suffix(".py") for old in FORMER_MODULES}
    assert len({path.read_text(encoding="utf-8").partition("\n")[2] for path in calling}) == 1


def test_an_unknown_name_is_an_ordinary_error() -> None:
    with pytest.raises(AttributeError, match="multiring has no attribute 'trip'"):
        importlib.import_module("multiring").trip  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'trip' from 'multiring'"):
        exec("from multiring import trip")  # noqa: S102


def test_no_former_name_is_a_current_name() -> None:
    assert len(NAMES) >= 12
    assert all(new not in FORMER[owner] for owner, _, new in NAMES)
