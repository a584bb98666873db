"""`multiring run` counts GPUs by the management library of NVIDIA's driver, for which the test has its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from multiring._runtime.engines.nvml import NVML, visible_gpus

SOURCE = """
static int is_open;
int nvmlInit_v2(void) { is_open = 1; return REFUSES; }
int nvmlDeviceGetCount_v2(unsigned* count) { if (!is_open) return 1; *count = GPUS; return 0; }
int nvmlShutdown(void) { is_open = 0; return 0; }
"""


def management_library(folder: Path, gpus: int, *, refuses: int = 0) -> Path:
    path = folder / NVML
    flags = [f"-DGPUS={gpus}", f"-DREFUSES={refuses}", "-shared", "-fPIC", "-x", "c", "-", "-o", str(path)]
    subprocess.run([os.environ.get("CC", "cc"), *flags], input=SOURCE, text=True, check=True)
    return path


@pytest.mark.parametrize(
    ("names", "seen"),
    [
        (None, 4),
        ("", 0),
        ("2", 1),
        ("0,1", 2),
        (" 3 , 1", 2),
        ("0,-1,1", 1),
        ("-1", 0),
        ("0,4,1", 1),
        ("GPU-8932f937,GPU-5a1b", 2),
        ("MIG-1,MIG-2,MIG-3,MIG-4,MIG-5", 5),
    ],
)
def test_ranks_see_the_gpus_that_the_variable_names(tmp_path: Path, names: str | None, seen: int) -> None:
    path = management_library(tmp_path, 4)
    assert visible_gpus({} if names is None else {"CUDA_VISIBLE_DEVICES": names}, str(path)) == seen


def test_a_host_without_a_driver_has_no_gpu(tmp_path: Path) -> None:
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "0"}, str(tmp_path / "none.so")) == 0
    assert visible_gpus({}, str(management_library(tmp_path, 4, refuses=9))) == 0


def told(folder: Path, *words: str) -> str:
    """Return what `multiring run` prints on a host whose libraries are in `folder`."""
    done = subprocess.run(
        [sys.executable, "-m", "multiring", "run", *words],
        env=os.environ | {"LD_LIBRARY_PATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    return done.stderr


def test_the_launcher_says_that_ranks_share_gpus(tmp_path: Path) -> None:
    management_library(tmp_path, 2)
    program = tmp_path / "program.py"
    program.write_text("pass\n", encoding="utf-8")
    said = "multiring: 3 ranks share 2 GPUs of this host; -n 2 gives each rank a GPU of its own "
    said += "(several GPUs: verified on stand-ins only)\n"
    assert said in told(tmp_path, "-n", "3", str(program))
    assert "GPU" not in told(tmp_path, "-n", "2", str(program))
    one = told(tmp_path, "-n", "2", "--env", "CUDA_VISIBLE_DEVICES=1", str(program))
    assert "2 ranks share 1 GPU of this host; -n 1 gives" in one
    assert "multiring: 2 ranks, one for each GPU of this host; -n N starts another number" in told(
        tmp_path, str(program)
    )
