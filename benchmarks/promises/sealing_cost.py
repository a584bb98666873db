"""Measure the CPU seconds that sealed connections cost, relative to the cipher alone.

    python benchmarks/promises/sealing_cost.py [--turns 5] [--mib 64] [--times 8]

Two ranks sum arrays over one rail of this host, unsealed and sealed by turns. The cipher alone encrypts and decrypts
the same number of bytes with the same libcrypto. The exit code is 1 if sealing adds more than 1.3 times the cipher's
CPU seconds.
"""

import argparse
import ctypes
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # lets this script import from the repository root

import numpy as np
from benchmarks.evidence.support.claims import commit, machine

import multiring
from multiring._native import load_crypto
from multiring._settings import environment_of, inherited_environment

MOST = 1.3
SECRET = "the secret of a benchmark"  # noqa: S105 -- of jobs on this machine
PIECE_BYTES = 1 << 18  # of the cipher's calls; a call from Python costs a hundredth of the work in it
GB = 1e9


def rank(mib: int, times: int) -> None:
    """Sum arrays; print the CPU seconds of this rank and the bytes that it sent."""
    group = multiring.init()
    array = np.ones(mib << 18, np.float32)
    for _ in range(2):
        group.all_reduce(array)
        array[:] = 1
    group.barrier()
    cpu_s, wall_s = time.process_time(), time.monotonic()
    for _ in range(times):
        group.all_reduce(array)
    told = {"cpu_s": time.process_time() - cpu_s, "wall_s": time.monotonic() - wall_s, "bytes": times * (mib << 20)}
    print(json.dumps(told), flush=True)
    multiring.shutdown()


def cost_of(mib: int, times: int, *, seal: bool) -> tuple[float, float]:
    """Return the CPU seconds per GB and rank, and the GB/s of a rank."""
    own = environment_of(engine="tcp", rails="127.0.0.1", seal=int(seal), secret=SECRET)
    words = [sys.executable, __file__, "--rank", "--mib", str(mib), "--times", str(times)]
    done = subprocess.run(  # noqa: S603
        [sys.executable, "-m", "multiring", "run", "-n", "2", "--here", "--", *words],
        env={**inherited_environment(), **own}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    told = [json.loads(line[line.index("{") :]) for line in done.stdout.splitlines() if "{" in line]
    each = [one["cpu_s"] / one["bytes"] * GB for one in told]
    return statistics.mean(each), told[0]["bytes"] / told[0]["wall_s"] / GB


def cipher_s_per_gb(total: int) -> float:
    """Return the CPU seconds in which libcrypto encrypts and decrypts a GB with AES-256-GCM."""
    library: Any = ctypes.CDLL("libcrypto.so.3")
    for name in ("EVP_CIPHER_CTX_new", "EVP_aes_256_gcm"):
        getattr(library, name).restype = ctypes.c_void_p
    begin_s = time.process_time()
    for encrypts in (1, 0):
        context = ctypes.c_void_p(library.EVP_CIPHER_CTX_new())
        cipher = ctypes.c_void_p(library.EVP_aes_256_gcm())
        assert library.EVP_CipherInit_ex(context, cipher, None, b"k" * 32, b"n" * 12, encrypts) == 1
        buffer = ctypes.create_string_buffer(PIECE_BYTES)
        done = ctypes.c_int()
        for _ in range(total // PIECE_BYTES):
            assert library.EVP_CipherUpdate(context, buffer, ctypes.byref(done), buffer, PIECE_BYTES) == 1
        library.EVP_CIPHER_CTX_free(context)
    return (time.process_time() - begin_s) / (total // PIECE_BYTES * PIECE_BYTES) * GB


def main() -> int:
    """Measure by turns and print a table; return 1 if sealing costs too much."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--turns", type=int, default=5, help="measurements of each kind")
    parser.add_argument("--mib", type=int, default=64, help="size of the arrays")
    parser.add_argument("--times", type=int, default=8, help="sums of a measurement")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        rank(arguments.mib, arguments.times)
        return 0
    print(f"# The cost of sealed connections, {time.strftime('%Y-%m-%d %H:%M')}\n")
    print(f"`{' '.join(['python', *sys.argv])}` at commit {commit()}, {machine()}, {load_crypto('')},")
    print(f"load {os.getloadavg()[0]:.1f}\n")
    print("| turn | unsealed, CPU s/GB | sealed | cipher alone | ratio | unsealed, GB/s | sealed |")
    print("|---|---|---|---|---|---|---|", flush=True)
    ratios = []
    for turn in range(arguments.turns):
        plain, plain_rate = cost_of(arguments.mib, arguments.times, seal=False)
        sealed, sealed_rate = cost_of(arguments.mib, arguments.times, seal=True)
        cipher = cipher_s_per_gb(1 << 30)
        ratios.append((sealed - plain) / cipher)
        print(
            f"| {turn} | {plain:.3f} | {sealed:.3f} | {cipher:.3f} | {ratios[-1]:.2f} "
            f"| {plain_rate:.2f} | {sealed_rate:.2f} |",
            flush=True,
        )
    middle = statistics.median(ratios)
    verdict = "holds" if middle <= MOST else "MISSED"
    interval = f"{min(ratios):.2f} to {max(ratios):.2f}"
    print(f"\n{verdict}: sealing adds {middle:.2f} times the cipher's CPU (floor {MOST}), {interval}")
    return 0 if middle <= MOST else 1


if __name__ == "__main__":
    sys.exit(main())
