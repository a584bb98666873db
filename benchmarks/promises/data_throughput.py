"""Compare the read speed of data loaders for arrays, small records and JPEGs.

    python benchmarks/promises/data_throughput.py [--only multiring,webdataset] [--cases jpeg] [--seconds 10]
        [--samples 2000]
    python benchmarks/promises/data_throughput.py --cold [--cases raw,jpeg] [--samples 2000]

Each library reads the same samples in its best format, with the same number of workers. It runs in its own venv below
MULTIRING_BENCH_PEERS, with this environment's torch. If an installation fails, the end of its log is shown. The
libraries take turns for some rounds. The table shows the median of samples per second and its share of a bound. For
arrays, the bound is one copy from the page cache with as many threads. For JPEGs, the bound is decoding alone.

With --cold, each turn is one epoch of files that are not in the page cache, as checked with mincore. The bound is then
the speed of reading the original files with as many threads. If this speed varies by more than 20 % between turns, the
result is undecided. Run the program on a quiet machine.
"""

import argparse
import ctypes
import io
import json
import mmap
import os
import shlex
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from pathlib import Path

import numpy as np
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[2]))  # lets this script import from the repository root

from benchmarks.evidence.support.claims import commit, machine

from multiring._settings import Settings, cache_folder, inherited_environment
from multiring.data import Dataset
from multiring.data.packing.writing import PackOptions, pack

LOADERS = Path(__file__).with_name("data_throughput_loaders.py")
# The pip arguments of each library. A library that pins other versions is installed without dependencies.
PEERS: dict[str, tuple[str, ...]] = {
    "multiring": (),
    "torch": (),
    "webdataset": ("webdataset braceexpand",),
    # The dependencies of streaming include another torch with GPU libraries, and clients for every cloud.
    "streaming": (
        "--no-deps mosaicml-streaming brotli catalogue python-snappy cramjam xxhash zstd",
        "transformers<5",  # streaming imports batch classes from transformers
    ),
    "litdata": ("litdata",),
    "tfdata": (),
    "tfdata_accurate": (),  # with the discrete cosine transform of the others
}
CASES = ("raw", "small", "jpeg")
RUN_S = 600.0
# A peer's environment has this one's torch but not multiring, which torch would load as a backend.
_QUIET = {"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "2", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}


def main() -> int:
    """Print a table for each case; return 1 if fewer than four other libraries ran."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PEERS), help="libraries to run, separated by commas")
    parser.add_argument("--cases", default=",".join(CASES), help=f"some of {','.join(CASES)}")
    parser.add_argument("--seconds", type=float, default=10.0, help="length of each turn (10)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of turns (5)")
    parser.add_argument("--samples", type=int, default=2000, help="samples in a data set (2000)")
    parser.add_argument("--cold", action="store_true", help="read one epoch from the disk in each turn")
    parser.add_argument(
        "--workers", type=int, default=os.cpu_count() or 1, help="workers of each library (number of cores)"
    )
    arguments = parser.parse_args()
    print(f"# Feeding, {time.strftime('%Y-%m-%d %H:%M')}\n")
    print(f"`{shlex.join(['python', *sys.argv])}` at commit {commit()}, {machine()}\n", flush=True)
    pythons = {name: installed(name) for name in arguments.only.split(",")}
    able = {name: python for name, python in pythons.items() if python}
    with tempfile.TemporaryDirectory() as folder:
        for case in arguments.cases.split(","):
            place = Path(folder) / case
            made(case, place, arguments.samples)
            print(
                f"## {case}\n\n| library | samples/s | least | most | of the bound |\n|---|---|---|---|---|", flush=True
            )
            show(case, place, able, arguments)
    return int(len(set(able) - {"multiring", "tfdata_accurate"}) < 4)


def installed(name: str) -> str | None:
    """Return the Python of a library's own environment, or None if its setup fails.

    The environment is created if it does not exist.
    """
    if not PEERS[name]:
        return sys.executable
    chosen = Settings.from_environment().bench_peers
    folder = (Path(chosen) if chosen else cache_folder() / "peers") / f"data-{name}"
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
        (site,) = folder.glob("lib/python*/site-packages")
        (site / "torch.pth").write_text(sysconfig.get_path("purelib"))
    for words in PEERS[name]:
        command = [str(python), "-m", "pip", "install", "-q", *words.split()]
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 -- our own command
        if done.returncode:
            print(f"{name}: pip install {words} failed:\n\n    {done.stderr.strip()[-500:]}\n", flush=True)
            return None
    return str(python)


def made(case: str, place: Path, samples: int) -> None:
    """Create a case's files and a pack of them.

    The other libraries convert the files to their own formats.
    """
    files = place / "files" / "a"
    files.mkdir(parents=True)
    for number in range(samples):
        generator = np.random.default_rng(number)
        if case == "jpeg":
            (files / f"{number:06}.jpg").write_bytes(photo(generator))
        else:
            shape = (16, 96, 96) if case == "raw" else (256,)
            np.save(files / f"{number:06}.npy", generator.normal(size=shape).astype(np.float32))
    kind = "imagefolder" if case == "jpeg" else "npy-files"
    data = Dataset(str(place / "files"), format=kind, shuffle="none", decode=False)
    options = PackOptions(check=data.require_decodable if case == "jpeg" else None)  # as `multiring data pack`
    pack(data.source, len(data), place / "pack", options, lambda *_: None)


def photo(generator: np.random.Generator) -> bytes:
    """Return a JPEG of 500 x 375 pixels and about 100 KB: coarse colours with grain."""
    coarse = Image.fromarray(generator.integers(0, 255, (12, 16, 3), dtype=np.uint8)).resize((500, 375))
    grain = generator.integers(-25, 25, (375, 500, 3))
    file = io.BytesIO()
    pixels = (np.asarray(coarse).astype(np.int64) + grain).clip(0, 255).astype(np.uint8)
    Image.fromarray(pixels).save(file, "JPEG", quality=88)
    return file.getvalue()


def show(case: str, place: Path, pythons: dict[str, str], arguments: argparse.Namespace) -> None:
    """Print the rows of a case, the bound first."""
    limit = "disk" if arguments.cold else "bound"
    rates: dict[str, list[float]] = {name: [] for name in (limit, *pythons)}
    if arguments.cold:  # The libraries convert the files in their first turn.
        for name, python in pythons.items():
            subprocess.run(  # noqa: S603 -- our own command
                [python, str(LOADERS), name, case, str(place), "1", "0.01"],
                env={**inherited_environment(), **_QUIET},
                capture_output=True,
                timeout=RUN_S,
                check=False,
            )
    failed: dict[str, str] = {}
    for _ in range(arguments.rounds):
        for name in [each for each in rates if each not in failed]:
            command = [pythons.get(name, sys.executable), str(LOADERS), name, case, str(place)]
            command += [str(arguments.workers), str(0 if arguments.cold else arguments.seconds)]
            if arguments.cold:
                let_go(place)
            environment = {**inherited_environment(), **_QUIET}
            done = subprocess.run(  # noqa: S603 -- our own command
                command, env=environment, capture_output=True, text=True, timeout=RUN_S, check=False
            )
            found = [line for line in done.stdout.splitlines() if line.startswith("RATE ")]
            if done.returncode or not found:
                failed[name] = (done.stderr.strip().splitlines() or ["it said nothing"])[-1][:200]
            else:
                rates[name].append(json.loads(found[-1].removeprefix("RATE ")))
    bound = statistics.median(rates[limit]) if rates[limit] else float("nan")
    for name, values in rates.items():
        if name in failed:
            print(f"| {name} | failed: {failed[name]} | | | |")
        else:
            middle = statistics.median(values)
            print(f"| {name} | {middle:.1f} | {min(values):.1f} | {max(values):.1f} | {middle / bound:.0%} |")
    if arguments.cold and rates[limit] and max(rates[limit]) > 1.2 * min(rates[limit]):
        print("\nundecided: the disk's own rate differs by more than 20 % between turns")
    print(flush=True)


def let_go(place: Path) -> None:
    """Evict all files below `place` from the page cache.

    Raises:
        RuntimeError: More than a hundredth of their pages is still there.
    """
    os.sync()
    pages = held = 0
    libc = ctypes.CDLL(None, use_errno=True)
    for path in place.rglob("*"):
        if not path.is_file() or not path.stat().st_size:
            continue
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            # The mapping is private, because ctypes requires writable memory. Nothing writes to it.
            mapped = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
            count = -(-len(mapped) // mmap.PAGESIZE)
            there = (ctypes.c_ubyte * count)()
            memory = ctypes.c_char.from_buffer(mapped)
            if libc.mincore(ctypes.c_void_p(ctypes.addressof(memory)), ctypes.c_size_t(len(mapped)), there):
                raise OSError(ctypes.get_errno(), "mincore")
            pages, held = pages + count, held + sum(each & 1 for each in there)
            del memory
            mapped.close()
    if held > pages / 100:
        raise RuntimeError(f"{held} of {pages} pages below {place} are still in the page cache")


if __name__ == "__main__":
    sys.exit(main())
