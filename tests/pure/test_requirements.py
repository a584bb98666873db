"""An adapter whose framework is missing or too old names the package to install."""

import subprocess
import sys
from types import ModuleType

import pytest

from multiring._frontend.requirements import OLDEST, require_framework


def test_a_framework_is_there_and_new_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    framework = ModuleType("some_framework")
    framework.__version__ = "2.21.0rc1"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "some_framework", framework)
    for oldest in ("2.21", "2.9"):
        monkeypatch.setitem(OLDEST, "some_framework", oldest)
        require_framework("some_framework", "Some")
    monkeypatch.setitem(OLDEST, "some_framework", "2.22")
    with pytest.raises(
        ImportError, match=r"multiring\.some_framework: Some 2\.21\.0rc1 is too old; want Some 2\.22 or"
    ):
        require_framework("some_framework", "Some")


def test_a_missing_framework_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jax", None)  # as if jax were not installed
    monkeypatch.delitem(sys.modules, "multiring.jax", raising=False)
    with pytest.raises(
        ImportError, match=r"JAX is not installed; want JAX [\d.]+ or newer: pip install 'multiring\[jax\]'"
    ):
        require_framework("jax", "JAX")


@pytest.mark.parametrize("module", OLDEST)
def test_each_adapter_names_what_to_install(module: str) -> None:
    """The import runs in its own process, in which the framework cannot be imported."""
    program = f"import sys; sys.modules[{module!r}] = None; import multiring.{module}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"ImportError: multiring.{module}: ")
    assert " is not installed; want " in last
    assert f"pip install 'multiring[{module}]'" in last or "docs/caffe.md" in last
