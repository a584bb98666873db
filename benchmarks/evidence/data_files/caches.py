"""Test `data clean` on random folders, and `data stage` into small caches."""

import contextlib
import io
import resource
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
from benchmarks.evidence.support.cases import Fault, Random

from multiring._settings import inherited_environment
from multiring.data.caching.blocks import BlockCache, clean
from multiring.errors import MultiringError

_NAMES = ("notes", "17", "3017", ".new-draft", "thesis.tex", "a.npy", "MANIFEST", "000017")
_FOLDERS = ("", "work", "quarantine", "readers", "work/000000", "work/000003", "deep/er")
_CONTENTS = (b"years of work", b"", b"MRB", b"\x93NUMPY", b"MRU1 or not")


def cleaning(random: Random, folder: Path) -> Iterator[Fault]:
    """Clean a folder that holds foreign files, with or without a cache's blocks.

    The foreign files must stay unchanged.
    """
    root = folder / "cache"
    root.mkdir(mode=0o700)
    if random.random() < 0.5:
        cache = BlockCache(root)
        for number in random.choice(5000, int(random.integers(1, 20)), replace=False).tolist():
            cache.put("0" * 32, number, random.bytes(int(random.integers(1, 500))))
    foreign: dict[Path, bytes] = {}
    for _ in range(int(random.integers(1, 15))):
        path = root / str(random.choice(_FOLDERS)) / str(random.choice(_NAMES))
        if path.exists() or any(parent.is_file() for parent in path.parents):
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(_CONTENTS[int(random.integers(len(_CONTENTS)))] + random.bytes(int(random.integers(0, 60))))
        foreign[path] = path.read_bytes()
    everything = bool(random.random() < 0.6)
    keep = int(random.integers(0, 2000)) if random.random() < 0.5 else None
    with contextlib.suppress(MultiringError), contextlib.redirect_stdout(io.StringIO()):
        clean(root, keep_bytes=keep, everything=everything)
    lost = [
        str(path.relative_to(root)) for path, data in foreign.items() if not path.exists() or path.read_bytes() != data
    ]
    if lost:
        yield Fault("clean: removed what no cache wrote", f"all={everything}, keep={keep}: {', '.join(lost)}")


def staging(random: Random, folder: Path) -> Iterator[Fault]:
    """Stage a pack into a cache that may be too small.

    The exit code must be 0 if and only if the cache keeps the whole pack.
    """
    command = [sys.executable, "-m", "multiring", "data"]
    (folder / "source").mkdir()
    for number in range(int(random.integers(3, 12))):
        np.save(folder / "source" / f"{number:03}.npy", random.normal(size=int(random.integers(60_000, 200_000))))
    pack = [*command, "pack", str(folder / "source"), str(folder / "pack"), "--format", "npy-files"]
    subprocess.run(pack, check=True, capture_output=True, env=inherited_environment())  # noqa: S603 -- our own
    size = sum(path.stat().st_size for path in (folder / "pack").glob("*.tar"))
    quota, most = 1 << 36, resource.RLIM_INFINITY
    if random.random() < 0.5:
        quota = int(random.integers(2 << 20, max(3 << 20, int(1.3 * size))))
    elif random.random() < 0.6:  # simulates a disk that cannot hold larger files
        most = int(random.integers(100_000, 2 << 20))
    limit = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (most, most))
    stage = [*command, "stage", str(folder / "pack"), "--folder", str(folder / "cache"), "--quota", str(quota)]
    done = subprocess.run(  # noqa: S603 -- our own; one thread
        stage, check=False, capture_output=True, text=True, preexec_fn=limit, env=inherited_environment()
    )
    kept = sum(
        path.stat().st_size - 24 for path in (folder / "cache").rglob("*") if path.name.isdecimal() and path.is_file()
    )
    if (done.returncode == 0) != (kept >= size):
        text = f"exit code {done.returncode}, {kept} of {size} bytes are kept; quota {quota}, files up to {most}"
        yield Fault("stage: an exit code that is not so", f"{text}\n{done.stdout}{done.stderr[-300:]}")
