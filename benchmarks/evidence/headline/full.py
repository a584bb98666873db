"""Train the headline networks at full size for a few steps each.

The claims cover the memory, and the speed compared with torch's autocast without multiring.
"""

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.evidence.headline.job import ProgramJob, losses_of, result_of
from benchmarks.evidence.support.claims import Claim
from examples.climate import generate as climate_generator
from examples.imagenet import generate as image_generator

STEPS = 5
PEAK_GIB = 10.0
HEIGHT, WIDTH = 768, 1152
IMAGES, CLASSES = 32, 8  # the images per step, and the classes of the data
RESNETS = {
    "ResNet-50, 224 x 224": ("--model=resnet50", f"--batch={IMAGES}"),
    "ResNet-101, 224 x 224": ("--model=resnet101", f"--batch={IMAGES}"),
}
WORDS = ("--precision=bf16", "--log-every=1", "--rate=1e-3", "--warmup=0", "--no-noise")


def resnets(share: int) -> Iterator[Claim]:
    """Train ResNets on two ranks, and in one process without multiring.

    Both use the same number of samples per step.
    """
    with tempfile.TemporaryDirectory() as home:
        data = Path(home) / "images"
        image_generator.generate(data, CLASSES, {"train": IMAGES // CLASSES}, size=224)
        for name, words in RESNETS.items():
            yield one(name, "imagenet", data, Path(home) / words[0], (*WORDS, *words), max(STEPS // share, 1))


def deeplab(share: int) -> Iterator[Claim]:
    """Train DeepLabv3+ on two ranks, and in one process without multiring."""
    yield from segmenting("DeepLabv3+", "deeplabv3+", share)


def tiramisu(share: int) -> Iterator[Claim]:
    """Train Tiramisu on two ranks, and in one process without multiring."""
    yield from segmenting("Tiramisu", "tiramisu", share)


def segmenting(name: str, model: str, share: int) -> Iterator[Claim]:
    """Yield the claim about one network of the climate program.

    Each rank has one sample. Both samples are the same field.
    """
    with tempfile.TemporaryDirectory() as home:
        data = Path(home) / "fields"
        climate_generator.generate(data, {"train": 1}, HEIGHT, WIDTH)
        (data / "train" / "data-000001.h5").hardlink_to(data / "train" / "data-000000.h5")
        words = (*WORDS, f"--model={model}", "--batch=2")
        name = f"{name}, {HEIGHT} x {WIDTH} x 16"
        yield one(name, "climate", data, Path(home) / model, words, max(STEPS // share, 1))


def one(name: str, program: str, data: Path, home: Path, words: Sequence[str], steps: int) -> Claim:
    """Return the claim about the memory and the speed of one network."""
    words = (*words, f"--epochs={steps}")  # an epoch of this data is one step
    ours, plain = home / "ours", home / "plain"
    with ProgramJob(2, program, "never", data, ours, words) as job:
        job.end()
        job.wait_for(lambda heard: len([word for word in heard if "peak_gib" in word]) == 2, 10)
        peaks = [word["peak_gib"] for word in job.heard]
    with ProgramJob(1, program, "never", data, plain, (*words, "--plain")) as job:
        job.end()
    rates = [rate_of(each) for each in (ours, plain)]
    told = " ".join(result_of(ours).get("peak", ["FLOP not counted"]))
    exposed_ms = result_of(ours)["step"]["exposed communication, ms a step"]
    return Claim(
        text=f"{name}, bf16, 2 ranks, {len(losses_of(ours))} steps: at most {PEAK_GIB:g} GiB a rank, and as many "
        "samples a second as one process with autocast and both cores",
        figure=f"{', '.join(f'{each:.2f}' for each in peaks)} GiB; {rates[0]:.4g} samples/s, plain {rates[1]:.4g}: "
        f"x {rates[0] / rates[1]:.3f}; exposed {exposed_ms:.1f} ms a step; {told}",
        holds=max(peaks) <= PEAK_GIB and rates[0] >= rates[1] and len(losses_of(ours)) == steps,
    )


def rate_of(run: Path) -> float:
    """Return the samples per second of a run."""
    headline = result_of(run)["headline"]
    return float(next(value for name, value in headline.items() if name.endswith(" a second")))
