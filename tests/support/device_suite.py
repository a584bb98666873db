"""Hooks of pytest for the tests of the torch adapter with device tensors: MULTIRING_TEST_DEVICE=cuda.

The tests in host_only_tests.toml are deselected. Any other test whose ranks or programs never have a device tensor
fails, so that none runs on host tensors unnoticed. The summary has the counts.
"""

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.support import device_use

if sys.version_info < (3, 11):
    import tomli as tomllib
else:
    import tomllib

ROOT = Path(__file__).parents[2]
LIST = Path(__file__).with_name("host_only_tests.toml")
COPIED = "multiring copied device tensors"
HELD = "device tensors in ranks, which multiring did not copy to the host"
UNAFFECTED = "no ranks and no programs"
HOST_ONLY = "host only, by name"
_KIND = "device tensors"

_PROGRAMS = ("python", "multiring", "mpi", "torchrun", "bash")
_programs: list[object] = []  # that this process has started
_host_only = pytest.StashKey[int]()


def host_only_tests() -> dict[str, str]:
    """Return the reason for each test that cannot have device tensors, by its name.

    A name is file::function for all parameters, file::function[id], or file.

    Raises:
        pytest.UsageError: a file has no such function, or a name is listed twice.
    """
    found: dict[str, str] = {}
    for entry in tomllib.loads(LIST.read_text("utf-8"))["because"]:
        for name in entry["tests"]:
            file, _, function = name.partition("::")
            path = ROOT / file
            text = path.read_text("utf-8") if path.is_file() else ""
            if (function or not text) and not re.search(
                rf"^def {re.escape(function.partition('[')[0])}\(", text, re.MULTILINE
            ):
                raise pytest.UsageError(f"{LIST.name} lists {name}: there is no such test; delete the line")
            if name in found:
                raise pytest.UsageError(f"{LIST.name} lists {name} twice")
            found[name] = entry["why"]
    return found


def split(items: Sequence[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Return the items that run with device tensors, and those that are host only.

    Raises:
        pytest.UsageError: the list has parameters of a function that no collected item of it has.
    """
    listed = host_only_tests()
    functions = {item.nodeid.partition("[")[0] for item in items}
    wanted = {name for name in listed if name.partition("[")[0] in functions}
    names = [{item.nodeid, item.nodeid.partition("[")[0]} for item in items]
    if missing := sorted(wanted - set[str]().union(*names)):
        raise pytest.UsageError(f"{LIST.name} lists tests that were not collected: {', '.join(missing)}")
    host_only = [item for item, own in zip(items, names, strict=True) if own & wanted]
    return [item for item in items if item not in host_only], host_only


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out the files that are host only."""
    return True if str(collection_path.relative_to(ROOT)) in host_only_tests() else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests that are host only."""
    for name in ("MULTIRING_TEST_DEVICE", "MULTIRING_TEST_ENGINE"):  # the programs of tests know no such settings
        os.environ.pop(name, None)
    kept, host_only = split(items)
    config.stash[_host_only] = len(host_only)
    config.hook.pytest_deselected(items=host_only)
    items[:] = kept
    output = getattr(config, "workeroutput", None)
    if output is not None:
        output["host_only"] = len(host_only)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:  # noqa: ARG001 -- the hook's
    """Take the number of deselected tests from a worker of pytest-xdist."""
    node.config.stash[_host_only] = getattr(node, "workeroutput", {}).get("host_only", 0)


def pytest_configure() -> None:
    """Count the programs that this process starts."""
    original = subprocess.Popen.__init__

    def init(self: Any, command: Any, *arguments: Any, **options: Any) -> None:
        words = [command] if isinstance(command, str | bytes | Path) else list(command)
        if Path(os.fsdecode(words[0])).name.startswith(_PROGRAMS) and "tests.support.nursery" not in words:
            _programs.append(words)
        original(self, command, *arguments, **options)

    setattr(subprocess.Popen, "__init__", init)  # noqa: B010 -- mypy does not let a method be assigned


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:  # noqa: ARG001 -- the hook's
    """Forget what earlier tests did."""
    device_use.seen.clear()
    _programs.clear()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Fail a test whose ranks or programs had only host tensors."""
    done = yield
    kind = _kind()
    item.user_properties.append((_KIND, kind))
    if not kind:
        pytest.fail(
            f"no rank or program of the test had a device tensor ({len(device_use.seen)} jobs, {len(_programs)} "
            f"programs): add it to {LIST.name} with the reason",
            pytrace=False,
        )
    return done


def _kind() -> str:
    if any(use.copied for use in device_use.seen):
        return COPIED
    if any(use.held for use in device_use.seen):
        return HELD
    return "" if device_use.seen or _programs else UNAFFECTED


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print how many tests ran with device tensors."""
    counts = Counter({HOST_ONLY: terminalreporter.config.stash.get(_host_only, 0)})
    for reports in terminalreporter.stats.values():
        for report in reports:
            if getattr(report, "when", "") == "call" and report.passed:
                counts.update(value for name, value in report.user_properties if name == _KIND)
    terminalreporter.section("tests with device tensors")
    for kind in (COPIED, HELD, UNAFFECTED, HOST_ONLY):
        terminalreporter.line(f"{counts[kind]:5} {kind}")
