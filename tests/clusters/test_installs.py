"""The guides' `pip install` lines, as they stand, in the tests' environment: it has all that they ask for.

pip sees no index and installs nothing.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.page_commands import COMMANDS, INSTALLS, Read

LINES = sorted(text for (_, text), how in COMMANDS.items() if isinstance(how, Read) and how.why == INSTALLS)


def test_each_guide_has_its_line() -> None:
    assert len(LINES) == 4


@pytest.mark.parametrize("line", LINES)
def test_the_line_asks_for_what_the_tests_run_with(line: str, tmp_path: Path) -> None:
    # `pip` is that of this environment, as after its activation. Without PYTHONPATH it finds the installed multiring.
    variables = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    options = {"PIP_NO_INDEX": "1", "PIP_DRY_RUN": "1", "PYTHON": sys.executable}
    done = subprocess.run(
        ["/bin/sh", "-c", f'pip() {{ "$PYTHON" -m pip "$@"; }}; {line}'],
        env=variables | options,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "does not provide the extra" not in done.stderr
    extra = line[line.index("[") : line.index("]") + 1]
    assert any(f"(from multiring{extra})" in told for told in done.stdout.splitlines()), done.stdout
