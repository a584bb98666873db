"""Record when, where and with which versions a run was made, so that others can repeat it."""

import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch

import multiring
from multiring._bench.machine import hardware

_GIT_S = 30.0


def circumstances(ranks: int, device: torch.device) -> dict[str, str]:
    """Return the end date, the command of a rank, the commit, the versions, and this host's processor and device."""
    versions = {
        "multiring": multiring.__version__,
        "PyTorch": torch.__version__,
        "NumPy": np.__version__,
        "Python": platform.python_version(),
    }
    return {
        "ended": time.strftime("%Y-%m-%d %H:%M %z"),
        "command of each rank": " ".join(sys.orig_argv),
        "ranks": str(ranks),
        "threads of a rank": str(torch.get_num_threads()),
        "commit": commit(),
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "processor of rank 0's host": hardware(),
        "device of rank 0": torch.cuda.get_device_name(device) if device.type == "cuda" else "the processor",
    }


def commit() -> str:
    """Return the commit of the program's git checkout, marked "-dirty" if files differ; "unknown" without one."""
    git = shutil.which("git")
    if git is None:
        return "unknown"
    command = [git, "-C", str(Path(sys.argv[0]).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        found = subprocess.run(command, check=False, capture_output=True, text=True, timeout=_GIT_S)  # noqa: S603 -- git itself
    except subprocess.TimeoutExpired:  # a file server that is gone
        return "unknown"
    return found.stdout.strip() or "unknown"
