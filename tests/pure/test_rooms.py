"""Rules beyond import-linter: pure packages import only arithmetic, and importing multiring has no side effects."""

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from tests import contracts

from multiring._former_names import FORMER_MODULES

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "multiring"
PURE_ROOMS = ("_agreement", "_topology", "_schedule", "_collectives", "planner")
# These modules give no access to files, clocks, the environment, threads or random numbers.
PURE_MODULES = {
    "__future__",
    "abc",
    "bisect",
    "collections",
    "dataclasses",
    "enum",
    "fractions",
    "functools",
    "hashlib",
    "heapq",
    "itertools",
    "json",
    "math",
    "numpy",
    "operator",
    "re",
    "struct",
    "sys",
    "tomli",
    "tomllib",
    "types",
    "typing",
}


def imported_modules(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            yield node.module or ""


@pytest.mark.parametrize("room", PURE_ROOMS)
def test_a_pure_room_imports_only_arithmetic(room: str) -> None:
    files = sorted((SOURCE / room).rglob("*.py"))
    assert files, f"no room {room}"
    for file in files:
        foreign = {
            name
            for name in imported_modules(file)
            if name.split(".")[0] not in PURE_MODULES
            and not name.startswith(
                ("multiring.errors", "multiring._former_names", *(f"multiring.{pure}" for pure in PURE_ROOMS))
            )
        }
        assert not foreign, f"{file.relative_to(SOURCE)} imports {sorted(foreign)}"


def public_rooms() -> list[str]:
    return sorted(room for room in contracts.rooms() - {former_name(old) for old in FORMER_MODULES} if room[0] != "_")


def former_name(module: str) -> str:
    return module.split(".")[1] if module.count(".") == 1 else ""


def test_a_public_room_lists_its_names_and_has_a_page() -> None:
    pages = "".join(each.read_text(encoding="utf-8") for each in (ROOT / "docs").glob("*.md"))
    assert {"torch", "data", "adapters", "trace"} <= set(public_rooms())
    for room in public_rooms():
        file = SOURCE / room / "__init__.py"
        text = (file if file.exists() else SOURCE / f"{room}.py").read_text(encoding="utf-8")
        assert room == "errors" or "\n__all__ = [" in text, f"{room}: want an __all__, or a name with an underscore"
        assert f"multiring.{room}" in pages, f"no page names multiring.{room}: want one, or a name with an underscore"


def test_users_are_not_led_to_internal_rooms() -> None:
    """Pages about the inside of multiring may name internal rooms, but no page and no example imports one."""
    users = [*(ROOT / "docs").glob("*.md"), ROOT / "README.md", *(ROOT / "examples").rglob("*.py")]
    importing = re.compile(r"^\s*(?:from|import) multiring(?:\._| import _)", re.MULTILINE)
    found = [str(each.relative_to(ROOT)) for each in users if importing.search(each.read_text(encoding="utf-8"))]
    assert not found, f"{found} import internal packages"


SHARED = [
    "multiring._frontend",
    *(f"multiring._frontend.{file.stem}" for file in sorted((SOURCE / "_frontend").glob("[a-z]*.py"))),
    "multiring._frontend.elastic.running",
    "multiring.convergence",
    "multiring.data",
    *(f"horovod.common.{name}" for name in ("basics", "elastic", "exceptions", "process_sets", "util")),
]


def test_what_all_frameworks_share_loads_none() -> None:
    program = f"""
import sys
sys.path.append({str(SOURCE / "horovod" / "onpath")!r})
from importlib import import_module
for name in {SHARED}:
    import_module(name)
loaded = {{name.partition(".")[0] for name in sys.modules}}
foreign = {{"torch", "mpi4py", "tensorflow", "jax", "chainer", "caffe"}} & loaded
assert not foreign, foreign
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=240)


@pytest.mark.parametrize("package", ["multiring", "multiring.torch"])
def test_no_module_has_the_name_of_an_exported_function(package: str) -> None:
    """Importing a module with such a name would replace the function in its package."""
    found = pytest.importorskip(package) if package == "multiring.torch" else importlib.import_module(package)
    folder = Path(str(found.__file__)).parent
    modules = {each.stem for each in folder.iterdir() if each.suffix == ".py" or (each / "__init__.py").exists()}
    exported = set(found.__all__) - {"elastic"}  # a module, as in Horovod
    assert not modules & exported
    assert not [name for name in exported if isinstance(getattr(found, name), ModuleType)]


def test_importing_multiring_touches_nothing() -> None:
    program = """
import os, sys
import numpy, ml_dtypes  # what multiring depends on may do as it likes
environment, descriptors, threads = dict(os.environ), os.listdir("/proc/self/fd"), os.listdir("/proc/self/task")
import multiring
foreign = {"torch", "mpi4py", "tensorflow", "jax"} & {name.partition(".")[0] for name in sys.modules}
assert not foreign, foreign
assert dict(os.environ) == environment
assert os.listdir("/proc/self/fd") == descriptors
assert os.listdir("/proc/self/task") == threads
"""
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, timeout=240)


@pytest.mark.parametrize("package", ["multiring", "multiring._launch", "multiring._runtime"])
def test_names_of_first_use_are_those_for_type_checkers(package: str) -> None:
    """None of them is a module's, because the import of the module would replace the name."""
    file = SOURCE.joinpath(*package.split(".")[1:], "__init__.py")
    guarded = [each for each in ast.parse(file.read_text(encoding="utf-8")).body if isinstance(each, ast.If)]
    assert len(guarded) == 1
    declared = [name for each in guarded[0].body if isinstance(each, ast.ImportFrom) for name in each.names]
    wanted = sorted(each.name for each in declared)
    script = f"import {package} as made; print(*sorted(set(dir(made)) - {{'__version__'}})); print(*vars(made))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    listed, present = (line.split() for line in done.stdout.splitlines())
    assert listed == wanted
    assert not set(present) & set(wanted), "imported before their first use"
    module = importlib.import_module(package)
    for name in wanted:
        assert not (file.parent / name).is_dir()
        assert not (file.parent / f"{name}.py").exists()
        assert getattr(module, name) is not None
    with pytest.raises(AttributeError, match="nothing_like_this"):
        module.nothing_like_this  # noqa: B018


@pytest.mark.parametrize("module", ["multiring._launch.host_agent", "multiring._cli.run"])
def test_launchers_and_agents_start_without_numpy(module: str) -> None:
    script = f"import {module}, sys; print(sorted({{'numpy', 'asyncio', 'multiring._native'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
