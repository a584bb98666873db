"""Attack sealed connections at random, and run random programs of collectives over them.

    python benchmarks/evidence/sealing/main.py [--only attacks,programs] [--divide N]

`attacks` puts a proxy between two ranks (native/tests/sealing_test.cc). The proxy flips bits, and drops, repeats,
swaps, cuts or injects records. No attack may change a sum. It resumes from build/sealing_attacks.json after an
interruption.
`programs` compares random programs of collectives with NumPy on every rank.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))  # lets this script import from the repository root

from benchmarks.evidence.support.claims import ROOT, Claim, commit, report

from multiring._settings import environment_of, inherited_environment

ATTACKS, A_TURN = 10_000, 250
KINDS = {1: "flip", 2: "drop", 3: "repeat", 4: "swap", 5: "cut", 6: "inject"}
PROGRAMS_S = 600.0
STATE = ROOT / "build/sealing_attacks.json"
TEST = ROOT / "build/dev/native/sealing_test"
SECRET = "the secret of random programs"  # noqa: S105 -- of jobs on this machine


def attacks(share: int) -> Iterator[Claim]:
    """Run random attacks in turns, each with its own seed."""
    build = ["cmake", "--build", str(ROOT / "build/dev"), "--target", "sealing_test"]
    if not TEST.exists():
        subprocess.run(build, cwd=ROOT, check=True, capture_output=True)  # noqa: S603
    known = json.loads(STATE.read_text()) if STATE.exists() else {}
    if known.get("commit") != commit():
        known = {"commit": commit(), "seeds": [], "counts": {}, "failed": [], "seconds": 0.0}
    wanted = ATTACKS // share
    while sum(known["counts"].values()) < wanted:
        seed = len(known["seeds"]) + 1
        begin = time.monotonic()
        done = subprocess.run([str(TEST), str(A_TURN), str(seed)], capture_output=True, text=True, check=False)  # noqa: S603
        known["seconds"] += time.monotonic() - begin
        known["seeds"].append(seed)
        for line in done.stdout.splitlines():
            words = line.split()
            if len(words) == 4 and words[0] == "attack" and words[3] == "times":
                kind = KINDS[int(words[1].rstrip(":"))]
                known["counts"][kind] = known["counts"].get(kind, 0) + int(words[2])
        if done.returncode != 0:
            known["failed"].append(f"seed {seed}, exit code {done.returncode}: {(done.stdout + done.stderr)[-1500:]}")
        STATE.parent.mkdir(exist_ok=True)
        STATE.write_text(json.dumps(known))
    total = sum(known["counts"].values())
    by_kind = ", ".join(f"{kind} {count:,}" for kind, count in sorted(known["counts"].items()))
    first = f"; first: {known['failed'][0]}".replace("\n", "<br>") if known["failed"] else ""
    yield Claim(
        text=f"{wanted:,} random attacks on a sealed connection: never a wrong sum, always an error",
        figure=f"{total:,} in {known['seconds']:.0f} s ({by_kind}), {len(known['failed'])} turns failed{first}",
        holds=not known["failed"] and total >= wanted and len(known["counts"]) == len(KINDS),
    )


def programs(share: int) -> Iterator[Claim]:
    """Run random programs over sealed rails, one and three."""
    for ranks, rails in ((2, 1), (3, 3)):
        names = ",".join(f"127.0.0.{rail + 1}" for rail in range(rails))
        own = environment_of(engine="tcp", rails=names, seal=1, secret=SECRET)
        seconds = PROGRAMS_S / share / 2
        program = ("-m", "tests.support.programs", "--seed", str(ranks), "--seconds", f"{seconds:.0f}")
        command = [sys.executable, "-m", "multiring", "run", "-n", str(ranks), "--", sys.executable, *program]
        environment = {**inherited_environment(), **own, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        done = subprocess.run(  # noqa: S603
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=seconds * 4 + 300
        )
        last = (done.stdout.strip().splitlines() or [""])[-1]
        yield Claim(
            text=f"random programs of {ranks} ranks over {rails} sealed rails have NumPy's values",
            figure=last if done.returncode == 0 else (done.stdout + done.stderr)[-1500:].replace("\n", "<br>"),
            holds=done.returncode == 0,
        )


if __name__ == "__main__":
    sys.exit(report({"attacks": attacks, "programs": programs}, __doc__ or ""))
