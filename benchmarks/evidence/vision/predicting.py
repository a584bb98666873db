"""Measure prediction on 2 ranks against 1, with one thread each: the time, and equal bytes.

    python benchmarks/evidence/vision/predicting.py [--divide N]

The pictures are JPEG files of 640 x 480 pixels of smooth noise, the model has random weights and sees squares of 128
pixels with 32 channels at first. Starting the processes and loading the model are left out: the time of a job with
few pictures is subtracted. `--divide` does 1/N of everything, as a trial.
"""

import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))  # lets this script import from the repository root
from benchmarks.evidence.support.claims import Claim, report
from benchmarks.evidence.vision.served_models import FOLDER, exported, photographs

_AIM, _FLOOR = 1.9, 1.8


def ranks(share: int) -> Iterator[Claim]:
    """Compare 2 ranks with 1, three times in turns."""
    model, many, few = exported(128, 32), photographs(max(64, 4000 // share), 640, 480), photographs(32, 640, 480)
    seconds: dict[int, list[float]] = {1: [], 2: []}
    for turn in range(3):
        for number, found in seconds.items():
            base = _seconds(model, few, number, FOLDER / f"few-{number}-{turn}.jsonl")
            found.append(_seconds(model, many, number, FOLDER / f"many-{number}-{turn}.jsonl") - base)
    results = [FOLDER / f"many-{number}-{turn}.jsonl" for number in seconds for turn in range(3)]
    contents = {each.read_bytes() for each in results}
    factor = statistics.median(seconds[1]) / statistics.median(seconds[2])
    times = ", ".join(
        f"{number} ranks: {', '.join(f'{each:.1f} s' for each in found)}" for number, found in seconds.items()
    )
    yield Claim(
        text=f"2 ranks predict at least {_FLOOR} (aim {_AIM}) times as fast as 1, one thread each",
        figure=f"{factor:.2f}x; {times}; {len(list(many.iterdir()))} pictures",
        holds=factor >= _FLOOR,
    )
    yield Claim(
        text="the bytes are the same", figure=f"{len(contents)} content of {len(results)}", holds=len(contents) == 1
    )


def _seconds(model: Path, folder: Path, number: int, out: Path) -> float:
    """Predict, and return the seconds."""
    out.unlink(missing_ok=True)
    shutil.rmtree(f"{out}.parts", ignore_errors=True)
    command = [sys.executable, "-m", "multiring"]
    predicting = [*command, "vision", "predict", str(model), str(folder), "--out", str(out)]
    words = [*command, "run", "-n", str(number), "--", *predicting]
    start = time.monotonic()
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # noqa: S603
    return time.monotonic() - start


if __name__ == "__main__":
    sys.exit(report({"ranks": ranks}, __doc__ or ""))
