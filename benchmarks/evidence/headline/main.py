"""Test the two headline programs beyond their accuracy.

    python benchmarks/evidence/headline/main.py [--only kills,many,others,precision,pages,...] [--divide N]

The claims are kills, many, others, precision, pages, resnets, tiramisu and deeplab. All jobs run under `multiring run`
on this machine, on generated data. `pages` checks the reports of the runs in build/headline in Chromium. The networks
of full size need a quiet machine and some minutes per step. `precision` resumes from build/headline_precision. The exit
code is 1 if any floor is missed.
"""

import hashlib
import io
import random
import re
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))  # lets this script import from the repository root

import numpy as np
from benchmarks.evidence.headline.full import deeplab, resnets, tiramisu
from benchmarks.evidence.headline.job import ProgramJob, losses_of, result_of, steps_done
from benchmarks.evidence.jobs.job import ROOT
from benchmarks.evidence.site.main import looked_at
from benchmarks.evidence.support.claims import Claim, report, shown
from examples.imagenet import generate as image_generator
from PIL import Image
from safetensors.torch import load_file

from multiring.training.run_folder import PAGE, RESULT

RUNS = ROOT / "build" / "headline"
PRECISION_RUNS = ROOT / "build" / "headline_precision"
KILLS, SAVE_EVERY = 10, 4
IN_SAVE, IN_ACCUMULATION = 3, 6  # the numbers of the kills that occur in a save and in an accumulation
SMALL_OPTIONS = ROOT / "examples" / "imagenet" / "small.toml"
CLASSES, BATCH, SIDE = 22_000, 65_536, 32
SEEDS, POINTS = 5, 3.0
STUDENT_90 = {2: 6.314, 3: 2.920, 4: 2.353, 5: 2.132}  # the two-sided 90 % quantile of Student's t, by number of seeds

SMALL = ("--model=resnet26", "--size=32", "--small", "--least-area=0.5", "--no-peak", "--no-noise", "--deterministic")
KILLED: tuple[str, ...] = (
    *SMALL,
    "--width=4",
    "--batch=12",
    "--micro-batch=2",
    "--epochs=12",
    "--optimizer=larc",
    "--trust=0.02",
)
KILLED += ("--rate=0.05", "--lag=1", f"--save-every={SAVE_EVERY}", "--log-every=1", "--evaluate-every=3")


def weights_of(run: Path) -> str:
    """Return a digest of the last checkpoint of a run.

    It covers the weights and everything else that the ranks share.
    """
    last = max((run / "checkpoints").glob("step-????????"))
    digest = hashlib.sha256(last.name.encode())
    for name, value in sorted(load_file(next(last.rglob("shared.safetensors"))).items()):
        digest.update(name.encode() + value.contiguous().numpy().tobytes())
    return digest.hexdigest()


def kills(share: int) -> Iterator[Claim]:
    """Kill a whole job ten times; compare its final weights with an undisturbed run."""
    choice = random.Random(22)  # noqa: S311 -- when to kill
    count = max(KILLS // share, 2)
    with tempfile.TemporaryDirectory() as home:
        data, whole, killed = Path(home) / "images", Path(home) / "whole", Path(home) / "killed"
        image_generator.generate(data, 3, {"train": 40, "val": 7, "shifted": 0}, size=SIDE)
        with ProgramJob(2, "imagenet", "never", data, whole, KILLED) as job:
            job.end()
        moments, redone, done = [], [], 0
        for number in range(count):
            moment = {IN_SAVE: "save:2", IN_ACCUMULATION: f"accumulation:{choice.randint(3, 9)}"}.get(number, "never")
            with ProgramJob(2, "imagenet", moment, data, killed, KILLED) as job:
                if moment == "never":
                    job.wait_until_step(killed, choice.randint(2, 7))
                    time.sleep(choice.uniform(0, 0.1))
                else:
                    job.wait_for(lambda heard: any("at" in word for word in heard), 300)
                job.kill()
                begun = job.resumed_from
            if number:
                redone.append(done - begun)
            done = steps_done(killed)[-1]
            moments.append(f"{moment.partition(':')[0].replace('never', 'step')} {done + 1}")
        with ProgramJob(2, "imagenet", "never", data, killed, KILLED) as job:
            job.end()
            redone.append(done - job.resumed_from)
        alike = weights_of(whole) == weights_of(killed)
        extra = len(steps_done(killed)) - len(steps_done(whole))
        steps = [len(set(losses_of(run))) > 1 and len(losses_of(run)) for run in (whole, killed)]
    yield Claim(
        text=f"images, 2 ranks, the whole job killed {count} times and resumed: the undisturbed run's weights, "
        "optimizer, lag and place in the data to the bit",
        figure=f"{'the same bits' if alike else 'OTHER bits'}; killed within {', '.join(moments)}; {steps[0]} and "
        f"{steps[1]} steps logged",
        holds=alike and steps[0] == steps[1] > 0,
    )
    yield Claim(
        text=f"of that, steps done again: no more than since the last checkpoint (each {SAVE_EVERY})",
        figure=f"{', '.join(map(str, redone))}: {sum(redone)} in all, {extra} by the count of steps",
        holds=all(0 <= each <= SAVE_EVERY for each in redone) and sum(redone) == extra,
    )


def many(share: int) -> Iterator[Claim]:
    """Train two steps with very many samples and classes, and kill the second step."""
    classes, batch = CLASSES // share, BATCH // share
    words: tuple[str, ...] = (
        *SMALL,
        "--width=4",
        f"--batch={batch}",
        "--micro-batch=256",
        "--epochs=2",
        "--save-every=1",
    )
    words += ("--optimizer=lars", "--rate=1.0", "--log-every=1")
    with tempfile.TemporaryDirectory() as home:
        data, whole, killed = Path(home) / "images", Path(home) / "whole", Path(home) / "killed"
        write_many(data, classes, batch)
        began = time.monotonic()
        with ProgramJob(2, "imagenet", "never", data, whole, words) as job:
            job.end()
        seconds = time.monotonic() - began
        # Imitate a kill in step 2: take the run as it was after step 1. Then kill a real second step.
        shutil.copytree(whole, killed)
        shutil.rmtree(killed / "checkpoints" / "step-00000002")
        with ProgramJob(2, "imagenet", "accumulation:1", data, killed, words) as job:
            job.wait_for(lambda heard: any("at" in word for word in heard), 1200)
            job.kill()
            begun = job.resumed_from
        with ProgramJob(2, "imagenet", "never", data, killed, words) as job:
            job.end()
            again = job.resumed_from
        alike = weights_of(whole) == weights_of(killed)
        losses = losses_of(whole)
    passes = -(-batch // 2 // 256)
    yield Claim(
        text=f"{classes} classes, random labels, {batch} images of {SIDE} pixels a step in {passes} micro-batches a "
        "rank: two steps, killed half-way through the second, resumed",
        figure=f"{'the same bits' if alike else 'OTHER bits'} as undisturbed; resumed from step {begun}, then {again}; "
        f"losses {shown([f'{each:.4f}' for each in losses])} (ln {classes} is {np.log(classes):.4f}); two steps with "
        f"their start took {seconds:.0f} s",
        holds=alike and begun == again == 1 and len(losses) == 2,
    )


def write_many(folder: Path, classes: int, count: int) -> None:
    """Write `count` images of noise, spread evenly over the folders of the classes."""
    noise = np.random.default_rng(0)
    encoded = []
    for _ in range(512):
        buffer = io.BytesIO()
        Image.fromarray(noise.integers(0, 256, (SIDE, SIDE, 3), np.uint8)).save(buffer, "JPEG")
        encoded.append(buffer.getvalue())
    for label in range(classes):
        (folder / "train" / f"n{label:08d}").mkdir(parents=True)
    for number in range(count):
        place = folder / "train" / f"n{number % classes:08d}" / f"{number // classes:06d}.JPEG"
        place.write_bytes(encoded[noise.integers(len(encoded))])


def others(share: int) -> Iterator[Claim]:
    """Train on two ranks, then from the middle on three, and compare the accuracies."""
    seeds = max(SEEDS // share, 2)
    classes, images, batch, epochs = 10, 400, 32, 6
    words: tuple[str, ...] = (*SMALL, "--width=16", f"--batch={batch}", f"--epochs={epochs}", "--optimizer=sgd")
    words += ("--rate=0.2", "--momentum=0.9", "--weight-decay=1e-4", "--warmup=0.5", "--save-every=40")
    words += ("--evaluate-every=100",)
    steps = classes * images // batch * epochs
    found: dict[str, list[float]] = {"2 ranks": [], "3 ranks": []}
    with tempfile.TemporaryDirectory() as home:
        data = Path(home) / "images"
        image_generator.generate(data, classes, {"train": images, "val": 200, "shifted": 0}, size=SIDE)
        for seed in range(seeds):
            whole, resumed = Path(home) / f"whole-{seed}", Path(home) / f"resumed-{seed}"
            with ProgramJob(2, "imagenet", "never", data, whole, (*words, f"--seed={seed}")) as job:
                job.end()
            found["2 ranks"].append(top_1(whole))
            with ProgramJob(2, "imagenet", "never", data, resumed, (*words, f"--seed={seed}")) as job:
                job.wait_until_step(resumed, steps // 2 - 1)
                job.kill()
            with ProgramJob(3, "imagenet", "never", data, resumed, (*words, f"--seed={seed}")) as job:
                job.end()
                assert job.resumed_from > 0
            found["3 ranks"].append(top_1(resumed))
    what = f"images of {classes} classes, 2 ranks and, from a checkpoint in the middle on, 3 against 2"
    yield compared(what, found["3 ranks"], found["2 ranks"])


def precision(share: int) -> Iterator[Claim]:
    """Compare the accuracies of bf16 and float32 on docs/imagenet.md's first example."""
    data = PRECISION_RUNS / "images"
    if not (data / "classes.txt").exists():
        image_generator.generate(data, 40, {"train": 400, "val": 100, "shifted": 0})
    found: dict[str, list[float]] = {"bf16": [], "float32": []}
    for seed in range(max(SEEDS // share, 2)):
        for name, each in found.items():
            run = PRECISION_RUNS / f"{name}-{seed}"
            if not (run / RESULT).exists():
                shutil.rmtree(run, ignore_errors=True)
                words = (
                    f"--options={SMALL_OPTIONS}",
                    f"--precision={name}",
                    f"--seed={seed}",
                    "--no-peak",
                    "--no-noise",
                )
                with ProgramJob(2, "imagenet", "never", data, run, words) as job:
                    job.end()
            each.append(top_1(run))
            print(f"{name}, seed {seed}: {each[-1]:.1f}", file=sys.stderr, flush=True)
    yield compared("images of 40 classes and 64 pixels, bf16 against float32", found["bf16"], found["float32"])


def compared(what: str, one: list[float], other: list[float]) -> Claim:
    """Return the claim that two settings reach the same accuracy with the same seeds."""
    apart = [each - base for each, base in zip(one, other, strict=True)]
    mean, half = statistics.mean(apart), STUDENT_90[len(apart)] * statistics.stdev(apart) / len(apart) ** 0.5
    return Claim(
        text=f"{what}, {len(apart)} seeds: 90 % interval of the difference of top-1 inside {POINTS:g} points",
        figure=f"{mean:+.2f} +- {half:.2f} points ({listed(one)} against {listed(other)})",
        holds=abs(mean) + half <= POINTS,
    )


def top_1(run: Path) -> float:
    """Return the top-1 accuracy of a run in per cent."""
    return float(result_of(run)["headline"]["val, top-1, %"])


def listed(values: list[float]) -> str:
    """Return the numbers as a text, separated by commas."""
    return ", ".join(f"{each:.1f}" for each in values)


def pages(share: int) -> Iterator[Claim]:  # noqa: ARG001 -- as the others
    """Check reports in a browser, at the widths of a phone and of a desktop."""
    runs = sorted(each for each in RUNS.glob("*") if (each / PAGE).exists())
    if not runs:
        sys.exit(f"no runs in {RUNS}: train with --run {RUNS}/NAME, as docs/imagenet.md and docs/climate.md say")
    with tempfile.TemporaryDirectory() as home:
        for number, run in enumerate(runs):
            shutil.copy(run / PAGE, Path(home) / f"{number}.html")
        for each in looked_at(Path(home), [f"{number}.html" for number in range(len(runs))]):
            name = runs[int(each["page"].partition(".")[0])].name
            text = (Path(home) / each["page"]).read_text(encoding="utf-8")
            outside = re.findall(r"(?:src|href)=['\"](?!data:|#)([^'\"]+)", text)
            yield Claim(
                text=f"report of {name} at {each['width']} px: no error in the console, no sideways scroll, no "
                "table or picture that is cut off, nothing from outside the file",
                figure=f"{len(each['errors'])} errors, {max(0, each['wide'])} px too wide, {each['cut']} cut off, "
                f"{len(outside)} from outside",
                holds=not each["errors"]
                and each["wide"] <= 0
                and not each["cut"]
                and each["text"] > 50
                and not outside,
            )


CLAIMS = {"kills": kills, "many": many, "others": others, "precision": precision, "pages": pages}
CLAIMS |= {"resnets": resnets, "tiramisu": tiramisu, "deeplab": deeplab}

if __name__ == "__main__":
    sys.exit(report(CLAIMS, __doc__ or ""))
