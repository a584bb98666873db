"""Run exported models in each minor release of onnxruntime of the last two years that PyPI has for this Python.

    python benchmarks/evidence/vision/runtimes.py

Each release is installed into a folder of its own in build/evidence/vision, and stays there, so that the program goes
on where it was. A model of each kind is trained on small generated pictures and exported. Its answers for pictures of
five sizes and batches must be those of this environment's onnxruntime to 1e-5: boxes in pixels, by their size.
"""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[3]))  # lets this script import from the repository root
from benchmarks.evidence.support.claims import Claim, report
from benchmarks.evidence.vision.served_models import FOLDER, trained_and_exported
from benchmarks.evidence.vision.trainings import KINDS

from multiring.vision.exporting.sessions import ExportedSession

_MOST = 1e-5
_OLDEST = (1, 20)  # of November 2024
_SHAPES = ((1, 30, 40, 3), (3, 64, 64, 3), (2, 200, 31, 3), (1, 1, 1, 3), (5, 16, 16, 3))
_PROGRAM = """
import sys
import numpy as np
import onnxruntime
session = onnxruntime.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
given = np.load(sys.argv[2])
names = [each.name for each in session.get_outputs()]
cases = {case: dict(zip(names, session.run(None, {"pixels": given[case]}))) for case in given}
np.savez(sys.argv[3], **{f"{case}/{name}": found[name] for case, found in cases.items() for name in names})
print(onnxruntime.__version__)
"""


def releases(_: int) -> Iterator[Claim]:
    """Run a model of each kind in each release."""
    models = {kind: trained_and_exported(kind) for kind in KINDS}
    random = np.random.default_rng(0)
    given: dict[str, dict[str, Any]] = {}
    expected: dict[str, dict[str, Any]] = {}
    for kind, model in models.items():
        session = ExportedSession.open(model)
        frames = session.model.description["frames"] if kind == "act" else 0
        shapes = [(each[0], frames, *each[1:]) if frames else each for each in _SHAPES]
        given[kind] = {f"case{n}": random.integers(0, 256, shape, np.uint8) for n, shape in enumerate(shapes)}
        expected[kind] = {
            f"{case}/{name}": found
            for case, pixels in given[kind].items()
            for name, found in session.run({"pixels": pixels}).items()
        }
    for release in _minor_releases():
        place = FOLDER / "onnxruntime" / release
        if not (place / "done").exists():
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(place)]
            subprocess.run([*pip, f"onnxruntime=={release}"], check=True)  # noqa: S603 -- our own words
            (place / "done").touch()
        told = {kind: _difference(release, models[kind], given[kind], expected[kind]) for kind in KINDS}
        yield Claim(
            text=f"onnxruntime {release} answers alike",
            figure="; ".join(
                f"{kind} {each:.1g}" if isinstance(each, float) else f"{kind} {each}" for kind, each in told.items()
            ),
            holds=all(isinstance(each, float) and each <= _MOST for each in told.values()),
        )


def _difference(release: str, model: Path, given: Any, expected: Any) -> float | str:
    """Return the largest difference of a release's answers, by 1 plus the size of the number; or why it has none."""
    np.savez(FOLDER / "given.npz", **given)
    files = map(str, (model, FOLDER / "given.npz", FOLDER / "found.npz"))
    (FOLDER / "found.npz").unlink(missing_ok=True)
    words = [sys.executable, "-c", _PROGRAM, *files]
    place = str(FOLDER / "onnxruntime" / release)
    done = subprocess.run(words, env={"PYTHONPATH": place}, capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode or done.stdout.strip() != release:
        return f"{done.stdout.strip()} {done.stderr.strip()[-200:]}"
    with np.load(FOLDER / "found.npz") as found:
        if set(found) != set(expected):
            return f"other outputs: {', '.join(sorted(set(found) ^ set(expected)))}"
        return max(
            float((np.abs(found[name].astype(np.float64) - each) / (1 + np.abs(each))).max(initial=0))
            for name, each in expected.items()
        )


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
