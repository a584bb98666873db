"""All experiments by name, each in a process of its own, and their results on the device of the record.

    python table.py NAME   prints the result of one experiment as JSON

Some experiments leave their process unusable. The codes in the results are those of cudaError_t and ncclResult_t.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from multiring._verify.behaviours import captures, memory, streams
from multiring._verify.behaviours.calls import CUDA
from multiring._verify.behaviours.nccl_calls import NCCL
from multiring._verify.behaviours.torch_calls import TORCH

MODULES = (streams, memory, captures)
"""The modules whose experiments are in CUDA."""
BEHAVIOURS: dict[str, Callable[[], Any]] = {**CUDA, **TORCH, **NCCL}
VARYING = {"registered_memory_is_unmapped_and_mapped_again"}
"""Experiments whose results differ from run to run on one device."""
_RECORD = Path(__file__).parent / "h100.json"
_LIMIT_S = 60  # an experiment that takes longer, with the import of PyTorch, counts as endless
_AT_ONCE = min(8, os.cpu_count() or 1)


def recorded() -> dict[str, Any]:
    """Return the results on an H100, by experiment."""
    found: dict[str, Any] = json.loads(_RECORD.read_text(encoding="utf-8"))
    return found


def results_here(names: Iterable[str], python: Sequence[str] = (sys.executable,)) -> dict[str, Any]:
    """Return the results of experiments on this machine's first device; several run at once.

    Args:
        names: of `BEHAVIOURS`.
        python: the command that runs a Python program.
    """

    def alone(name: str) -> Any:
        command = [*python, __file__, name]
        try:
            done = subprocess.run(  # noqa: S603 -- this file
                command, capture_output=True, text=True, timeout=_LIMIT_S, check=False
            )
        except subprocess.TimeoutExpired:
            return "endless"
        lines = done.stdout.splitlines()
        return json.loads(lines[-1]) if lines and done.returncode == 0 else f"ended without a result: {done.returncode}"

    chosen = list(names)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return dict(zip(chosen, pool.map(alone, chosen), strict=True))


def _tried(name: str) -> Any:
    try:
        return BEHAVIOURS[name]()
    except Exception as error:  # noqa: BLE001 -- the error is the behaviour
        return f"{type(error).__name__}: {str(error).splitlines()[0][:100]}"


if __name__ == "__main__":
    sys.stdout.write("\n" + json.dumps(_tried(sys.argv[1]), default=str) + "\n")
    sys.stdout.flush()
    os._exit(0)  # some experiments leave threads or a context that would not end
