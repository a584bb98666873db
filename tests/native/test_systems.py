"""The build fails with a reason on systems that multiring does not support."""

import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
TOOLS = Path(sys.prefix) / "bin"


@pytest.mark.parametrize(("system", "processor"), [("FreeBSD", "x86_64"), ("Linux", "riscv64")])
def test_the_build_refuses_other_systems(system: str, processor: str, tmp_path: Path) -> None:
    configuration = subprocess.run(
        [
            TOOLS / "cmake",
            *("-S", REPOSITORY, "-B", tmp_path, "-G", "Ninja"),
            f"-DCMAKE_MAKE_PROGRAM={TOOLS / 'ninja'}",
            f"-DCMAKE_SYSTEM_NAME={system}",
            f"-DCMAKE_SYSTEM_PROCESSOR={processor}",
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    message = " ".join(configuration.stderr.split())
    assert configuration.returncode != 0
    assert f"multiring runs on Linux x86_64 and aarch64, not on {system} {processor}" in message
