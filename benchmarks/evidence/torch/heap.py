"""Run random programs of reductions in torch's memory with several allocators.

    python benchmarks/evidence/torch/heap.py [--seconds 120] [--allocators glibc,jemalloc] [--first-seed 1]

The allocators check their heaps. Each program has two ranks. A program that finds a wrong byte, dies or hangs counts as
a miss, and is printed with its seed. jemalloc and tcmalloc come from Debian's libjemalloc2 and libtcmalloc-minimal4.
The output says which allocators are not installed.
"""

import argparse
import contextlib
import ctypes.util
import itertools
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))  # lets this script import the tests' programs

import torch
import torch.distributed as dist
from benchmarks.evidence.support.claims import commit, machine
from tests.support.heap_programs import Program

from multiring._settings import Settings

TURNS = 600
HANGS_S = 300.0
# Each allocator has a library to preload and additional environment variables.
ALLOCATORS: dict[str, tuple[str | None, dict[str, str]]] = {
    "glibc": (None, {}),
    "glibc, freed memory overwritten": (None, {"MALLOC_PERTURB_": "165"}),
    "glibc, checked": ("c_malloc_debug", {"MALLOC_CHECK_": "3", "MALLOC_PERTURB_": "90"}),
    "jemalloc": ("jemalloc", {}),
    "tcmalloc": ("tcmalloc_minimal", {}),
}


def main() -> int:
    """Print a line for each allocator; return 1 if a program failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=120.0, help="time for each allocator")
    parser.add_argument(
        "--allocators", default="", help="prefixes of the allocators' names, separated by commas (default: all)"
    )
    parser.add_argument(
        "--first-seed", type=int, default=1, help="seed of the first program; later programs use the next seeds"
    )
    parser.add_argument("--play", nargs=2, metavar=("SEED", "FOLDER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.play:
        return play(int(arguments.play[0]), Path(arguments.play[1]))
    print(f"# Reductions in torch's own memory, {time.strftime('%Y-%m-%d %H:%M')}\n")
    print(f"`{' '.join(['python', *sys.argv])}` at commit {commit()}, {machine()}, torch {torch.__version__}\n")
    print(f"| allocator | programs of {TURNS} turns that ran clean | seconds |\n|---|---|---|", flush=True)
    missed = 0
    wanted = tuple(arguments.allocators.split(","))
    for name in [each for each in ALLOCATORS if each.startswith(wanted)]:
        start = time.monotonic()
        clean, bad = try_allocator(name, arguments.first_seed, arguments.seconds)
        if clean is None:
            print(f"| {name} | not installed here | |", flush=True)
            continue
        missed += len(bad)
        told = f"{clean} of {clean + len(bad)}"
        print(f"| {name} | {told}{f', not seeds {bad}' if bad else ''} | {time.monotonic() - start:.0f} |", flush=True)
    return 1 if missed else 0


def try_allocator(name: str, first: int, seconds: float) -> tuple[int | None, list[int]]:
    """Return the number of programs that ran without a fault, and the other seeds.

    The number is None if the allocator is not installed.
    """
    library, environment = ALLOCATORS[name]
    variables = [f"{key}={value}" for key, value in environment.items()]
    if library is not None:
        found = ctypes.util.find_library(library) or _unlinked(library)
        if found is None:
            return None, []
        variables.append(f"LD_PRELOAD={found}")
    start, clean = time.monotonic(), 0
    bad: list[int] = []
    for seed in itertools.count(first):
        if clean + len(bad) and time.monotonic() - start > seconds:
            break
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "multiring", "run", "-n", "2", "--", "env", *variables]
            told = _told_by([*command, sys.executable, __file__, "--play", str(seed), folder])
        clean += told is None
        if told is not None:
            bad.append(seed)
            print(f"\n{name}, seed {seed}:\n{told}\n", flush=True)
    return clean, bad


def _unlinked(library: str) -> str | None:
    """Find a library that is installed only for preloading, without a linker name."""
    for folder in (Path("/usr/lib/x86_64-linux-gnu"), Path("/usr/lib/aarch64-linux-gnu"), Path("/usr/lib64")):
        for path in sorted(folder.glob(f"lib{library}.so.*")):
            return str(path)
    return None


def _told_by(command: list[str]) -> str | None:
    """Return the end of a failed program's output, or None if the program succeeded."""
    try:
        ended = subprocess.run(  # noqa: S603 -- our own
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=HANGS_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        return f"hangs after {HANGS_S:g} s\n{(error.stdout or b'')[-2000:].decode(errors='replace')}"
    return ended.stdout[-2000:].decode(errors="replace") if ended.returncode else None


def play(seed: int, folder: Path) -> int:
    """Run one rank of the program of `seed`: two or more jobs, one after the other."""
    torch.set_num_threads(1)
    settings = Settings.from_environment()
    rank, ranks = settings.rank or 0, settings.size or 1
    numbers = itertools.count()

    @contextlib.contextmanager
    def meet() -> Iterator[None]:
        store: object = dist.FileStore(str(folder / f"store{next(numbers)}"), ranks)  # type: ignore[attr-defined]
        dist.init_process_group("multiring", store=store, rank=rank, world_size=ranks)  # type: ignore[arg-type]
        yield
        dist.destroy_process_group()

    Program(seed, meet).run(TURNS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
