"""Compare the times of `mt.save` and `mt.load` with `torch.save` and `torch.load`.

    python benchmarks/promises/checkpoint_speed.py [--mib 1024] [--rounds 5]

Both libraries call fsync, and their runs alternate. The program prints the medians and their ratios. It also prints the
memory that saving and loading take in addition to the model, from the kernel's peak resident set.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))  # lets this script import from the repository root

from benchmarks.evidence.support.claims import machine

import multiring.torch as mt

_WIDTH = 2048


def model_of(mib: int) -> torch.nn.Module:
    """Return a model of about `mib` MiB."""
    layers = max(1, (mib << 20) // (4 * _WIDTH * _WIDTH))
    return torch.nn.Sequential(*(torch.nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(layers)))


def peak_mib() -> int:
    """Return the peak resident set since `forget_peak`, in MiB."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) >> 10


def forget_peak() -> None:
    """Reset the kernel's peak of the resident set."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def torch_saves(model: torch.nn.Module, file: Path) -> None:
    """Save with torch to disk, replacing the previous file in one step."""
    new = file.with_suffix(".new")
    with new.open("wb") as opened:
        torch.save(model.state_dict(), opened)
        opened.flush()
        os.fsync(opened.fileno())
    new.replace(file)


def taken(act: Callable[[], object]) -> tuple[float, int]:
    """Run a function; return its seconds and its additional memory in MiB."""
    forget_peak()
    before, began = peak_mib(), time.perf_counter()
    act()
    return time.perf_counter() - began, peak_mib() - before


def main() -> int:
    """Measure and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    mt.init()
    model = model_of(arguments.mib)
    print(f"{arguments.mib} MiB, {arguments.rounds} rounds, {machine()}, load {os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory(dir=".") as name:
        ours, theirs = Path(name) / "ours", Path(name) / "theirs.pt"
        acts: dict[str, Callable[[], object]] = {
            "torch.save": lambda: torch_saves(model, theirs),
            "mt.save": lambda: mt.save(ours, model=model),
            "torch.load": lambda: model.load_state_dict(torch.load(theirs)),
            "mt.load": lambda: mt.load(ours, model=model),
        }
        found: dict[str, list[tuple[float, int]]] = {each: [] for each in acts}
        for _ in range(arguments.rounds):
            for each, act in acts.items():
                found[each].append(taken(act))
    medians = {each: statistics.median(seconds for seconds, _ in runs) for each, runs in found.items()}
    for each, runs in found.items():
        print(f"{each:<11} {medians[each]:7.2f} s, {max(memory for _, memory in runs):5} MiB beside the model")
    for what in ("save", "load"):
        print(f"{what}: {medians[f'mt.{what}'] / medians[f'torch.{what}']:.2f} times torch's")
    return 0


if __name__ == "__main__":
    sys.exit(main())
