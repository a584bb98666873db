"""Run exported models in each minor release of onnxruntime of the last two years that PyPI has for this Python.

    python benchmarks/evidence/vision/runtimes.py

Each release is installed into a folder of its own in build/evidence/vision, and stays there, so that the program goes
on where it was. The model's answers for pictures of five sizes and batches must be those of this environment's
onnxruntime to 1e-5.
"""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[3]))  # lets this script import from the repository root
from benchmarks.evidence.support.claims import Claim, report
from benchmarks.evidence.vision.served_models import FOLDER, exported

from multiring.vision.exporting.sessions import ExportedSession

_OLDEST = (1, 20)  # of November 2024
_SHAPES = ((1, 30, 40, 3), (3, 64, 64, 3), (2, 200, 31, 3), (1, 1, 1, 3), (5, 16, 16, 3))
_PROGRAM = """
import sys
import numpy as np
import onnxruntime
session = onnxruntime.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
given = np.load(sys.argv[2])
found = {name: session.run(None, {"pixels": given[name]})[0] for name in given}
np.savez(sys.argv[3], **found)
print(onnxruntime.__version__)
"""


def releases(_: int) -> Iterator[Claim]:
    """Run a model in each release."""
    model = exported(64, 16)
    random = np.random.default_rng(0)
    given = {f"case{number}": random.integers(0, 256, shape, np.uint8) for number, shape in enumerate(_SHAPES)}
    session = ExportedSession.open(model)
    expected = {name: session.run({"pixels": pixels})["probabilities"] for name, pixels in given.items()}
    np.savez(FOLDER / "given.npz", **given)  # type: ignore[arg-type] # arrays by name
    for release in _minor_releases():
        place = FOLDER / "onnxruntime" / release
        if not (place / "done").exists():
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(place)]
            subprocess.run([*pip, f"onnxruntime=={release}"], check=True)  # noqa: S603 -- our own words
            (place / "done").touch()
        files = map(str, (model, FOLDER / "given.npz", FOLDER / "found.npz"))
        words = [sys.executable, "-c", _PROGRAM, *files]
        done = subprocess.run(words, env={"PYTHONPATH": str(place)}, capture_output=True, text=True, check=False)  # noqa: S603
        difference = float("inf")
        if done.returncode == 0 and done.stdout.strip() == release:
            with np.load(FOLDER / "found.npz") as found:
                difference = max(float(np.abs(found[name] - expected[name]).max()) for name in expected)
        figure = f"largest difference {difference:.1g}" if done.returncode == 0 else done.stderr.strip()[-200:]
        yield Claim(text=f"onnxruntime {release} answers alike", figure=figure, holds=difference <= 1e-5)


def _minor_releases() -> list[str]:
    """Return the last release of each minor version, ascending."""
    words = [sys.executable, "-m", "pip", "index", "versions", "onnxruntime", "--json"]
    told = json.loads(subprocess.run(words, capture_output=True, text=True, check=True).stdout)  # noqa: S603
    found: dict[tuple[int, int], tuple[int, str]] = {}
    for text in told["versions"]:
        if match := re.fullmatch(r"(\d+)\.(\d+)\.(\d+)", text):
            minor, patch = (int(match[1]), int(match[2])), int(match[3])
            if minor >= _OLDEST:
                found[minor] = max(found.get(minor, (-1, "")), (patch, text))
    return [text for _, (_, text) in sorted(found.items())]


if __name__ == "__main__":
    sys.exit(report({"releases": releases}, __doc__ or ""))
