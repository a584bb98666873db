"""The conda recipe agrees with pyproject.toml, and the scripts of .ci accept the documented arguments."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from multiring._version import VERSION

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
NAME = re.compile(r"^([\w-]+) ?(.*)$")


def requirements(lines: list[str]) -> dict[str, str]:
    """Return the required versions by name, from lines of either format, without markers and extras."""
    found = {}
    for line in lines:
        match = NAME.match(line.partition(";")[0].strip())
        assert match, line
        found[match[1].replace("_", "-")] = match[2].strip()
    return found


@pytest.fixture
def recipe() -> Any:
    return yaml.safe_load((ROOT / "packaging" / "conda" / "recipe.yaml").read_text())


def test_the_conda_recipe_wants_what_the_project_wants(recipe: Any) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert recipe["context"]["version"] == VERSION
    wanted = requirements(project["project"]["dependencies"])
    assert requirements(recipe["requirements"]["run"]) == {"python": project["project"]["requires-python"], **wanted}
    host = requirements(recipe["requirements"]["host"])
    assert requirements(project["build-system"]["requires"]).items() <= host.items()
    assert recipe["about"]["summary"] == project["project"]["description"]
    assert recipe["about"]["license"] == project["project"]["license"]
    assert all((ROOT / name).is_file() for name in recipe["about"]["license_file"])
    assert (ROOT / "packaging" / "conda" / recipe["source"]["path"]).resolve() == ROOT


def test_interpreters_that_are_not_there_are_told_as_untried(tmp_path: Path) -> None:
    # The script runs in a copy of the tree whose folder of wheels fits no interpreter.
    for name in (".ci/wheel-check", "constraints.txt", "examples/digits_torch.py", "examples/digits_horovod.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    (tmp_path / "benchmarks" / "evidence" / "wheel").mkdir(parents=True)
    (tmp_path / "benchmarks" / "evidence" / "wheel" / "ordinary_user.py").write_text("")
    (tmp_path / "wheelhouse").mkdir()
    (tmp_path / "wheelhouse" / "multiring-0-py3-none-any.whl").write_text("")
    command = ["bash", str(tmp_path / ".ci" / "wheel-check"), "python9.1", "python9.2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 1, done.stderr
    wanted = [f"untried: python9.{minor}: not found, or none that an ordinary user may run" for minor in (1, 2)]
    assert done.stdout.splitlines() == ["tried: none", *wanted]


def test_the_extension_reads_no_fields_that_the_stable_abi_has_not() -> None:
    """From Python 3.12 on, builds use the stable ABI. Builds for older versions would not notice a hidden field."""
    hidden = re.compile(r"->(?:tp|ob|nb|sq|mp)_\w+|\bPy(?:List|Tuple|Bytes|Unicode|Float)_(?:GET|SET|AS)_[A-Z]+\b")
    found = [
        f"{path.name}: {match[0]}"
        for path in sorted((ROOT / "native" / "bind").glob("*"))
        for match in hidden.finditer(path.read_text())
    ]
    assert not found
