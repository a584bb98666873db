"""Record how CUDA, PyTorch's CUDA layer and NCCL behave on the GPU of this machine.

    python benchmarks/studies/gpu/behaviours.py [--save FILE] [--against FILE] [--only NAME,...]

A behaviour is a small experiment with a result that does not depend on time, e.g. the error code of a call or the value
that a copy saw. The stand-ins on which multiring's GPU code is tested must behave in the same way. `--against` compares
with a saved record and prints each difference. The program needs one GPU and PyTorch with CUDA. Without a GPU, it
prints NOT RUN and ends with exit code 3.

Each experiment runs in a process of its own, as some leave theirs unusable; several run at once. The codes are those of
cudaError_t and ncclResult_t.
"""

import argparse
import json
import multiprocessing
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))  # lets this script import from the repository root

from benchmarks.studies.gpu.behaviours_cuda import CUDA
from benchmarks.studies.gpu.behaviours_nccl import NCCL
from benchmarks.studies.gpu.behaviours_torch import TORCH

LIMIT_S = 60  # an experiment that takes longer, with the import of PyTorch, counts as endless
AT_ONCE = 8
NO_GPU = 3


def _answer(pipe: Any, name: str) -> None:
    pipe.send(_tried(BEHAVIOURS[name]))
    pipe.close()


def _tried(behaviour: Callable[[], Any]) -> Any:
    try:
        return behaviour()
    except Exception as error:  # noqa: BLE001 -- the error is the behaviour
        return f"{type(error).__name__}: {str(error).splitlines()[0][:100]}"


def alone(name: str) -> Any:
    """Return the result of a behaviour in a new process, or how the process ended."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(theirs, name), daemon=True)
    process.start()
    theirs.close()
    try:
        found = ours.recv() if ours.poll(LIMIT_S) else "endless"
    except EOFError:
        found = "ended without a result"
    process.join(2)
    if process.is_alive():
        process.kill()
        process.join()
    return found


BEHAVIOURS: dict[str, Callable[[], Any]] = {**CUDA, **TORCH, **NCCL}


def differences(here: dict[str, Any], there: dict[str, Any]) -> list[str]:
    """Return one line for each behaviour of `there` that differs in `here`."""
    return [
        f"DIFFERS {name}: here {here.get(name)!r}, there {each!r}"
        for name, each in there.items()
        if here.get(name) != each
    ]


def main() -> int:
    """Run the command; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", help="file for the record, as JSON")
    parser.add_argument("--against", help="record to compare with")
    parser.add_argument("--only", help="behaviours to run, separated by commas")
    arguments = parser.parse_args()
    import torch  # noqa: PLC0415 -- slow, and not needed for --help

    if not torch.cuda.is_available():
        print("NOT RUN: PyTorch sees no GPU")
        return NO_GPU
    chosen = arguments.only.split(",") if arguments.only else list(BEHAVIOURS)
    found: dict[str, Any] = {}
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for name, each in zip(chosen, pool.map(alone, chosen), strict=True):
            found[name] = json.loads(json.dumps(each, default=str))
            print(f"{name}: {json.dumps(found[name])}", flush=True)
    if arguments.save:
        Path(arguments.save).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if not arguments.against:
        return 0
    lines = differences(found, json.loads(Path(arguments.against).read_text(encoding="utf-8")))
    print("\n".join(lines) or "no difference")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
