"""Pictures of stamps on photographs, from Debian's packages, for detection, segmentation and automatic labelling.

A stamp is a cut-out picture of tuxpaint-stamps-default. One to six of them lie on a square part of a photograph; their
longer sides are a twelfth to a third of the picture's, they are turned by any angle, and others hide at most 30 % of
each. Every stamp is drawn equally often. A tenth of the pictures has none. The parts "train", "val" and "test" share
neither photographs nor stamps; stamps that look alike are in one part.

Labels are the visible pixels of each stamp, as masks in a COCO file. Their bounds are the boxes.
"""

import hashlib
import json
import subprocess
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from multiring.vision.duplicates import near_pairs
from multiring.vision.run_lengths import run_lengths_of
from multiring.vision.signatures import signature_of

SIDE = 320
PICTURES = {"train": 3000, "val": 300, "test": 600}
SHARES = {"train": 0.65, "val": 0.10, "test": 0.25}  # of the stamps of a class, and of the photographs
_SEED = 37
_SMALLEST, _LARGEST = 1 / 12, 1 / 3  # a stamp's longer side
_MOST_HIDDEN = 0.3
_EMPTY = 0.1
_QUALITY = 92
STAMPS = "tuxpaint-stamps-default"
_STAMPS_FOLDER = f"{STAMPS}/usr/share/tuxpaint/stamps"
_PHOTOGRAPHS = {
    "mate-backgrounds/usr/share/backgrounds/mate/nature": (
        "Aqua.jpg Blinds.jpg Dune.jpg Garden.jpg GreenMeadow.jpg LadyBird.jpg RainDrops.jpg Storm.jpg TwoWings.jpg "
        "Wood.jpg YellowFlower.jpg"
    ),
    "lomiri-wallpapers-16.04/usr/share/backgrounds": (
        "Bridge_* Dragonfly_* Picture_0B_* Picture_1A_* Wine_* aitzgorri_* free_* friends_* greentock_* life_* "
        "picosdeeuropa_* seeding_* sunset_*"
    ),
    "lomiri-wallpapers-20.04/usr/share/backgrounds": "Kleiber_*",
    "plasma-workspace-wallpapers/usr/share/wallpapers": (
        "BytheWater/*/*/2560x1600.jpg ColdRipple/*/*/2560x1600.jpg ColorfulCups/*/*/2560x1600.jpg "
        "EveningGlow/*/*/2560x1600.jpg FallenLeaf/*/*/2560x1600.jpg Grey/*/*/2560x1600.jpg Kite/*/*/2560x1600.jpg "
        "OneStandsOut/*/*/2560x1600.jpg Path/*/*/2560x1600.jpg summer_1am/*/*/2560x1600.jpg"
    ),
    "opencv-doc/usr/share/doc/opencv-doc/examples": (
        "alphamat/input_images/plant.jpg data/aero1.jpg data/aloeL.jpg data/apple.jpg data/baboon.jpg data/board.jpg "
        "data/building.jpg data/butterfly.jpg data/ela_original.jpg data/fruits.jpg data/home.jpg data/left.jpg "
        "data/leuvenA.jpg data/licenseplate_motion.jpg data/messi5.jpg data/orange.jpg data/squirrel_cls.jpg "
        "data/stuff.jpg hfs/data/000.jpg hfs/data/002.jpg text/scenetext01.jpg text/scenetext02.jpg "
        "text/scenetext03.jpg text/scenetext04.jpg text/scenetext05.jpg text/scenetext06.jpg"
    ),
}
_PHOTOGRAPH_SIDE = 900  # photographs are kept at this shorter side


@dataclass(frozen=True, kw_only=True, slots=True)
class Stamp:
    """A cut-out: its name, its class, and its pixels with alpha, cropped to what is visible."""

    name: str
    class_name: str
    pixels: Image.Image


def unpacked(folder: Path) -> None:
    """Download the packages and unpack them into the folder, without installing them."""
    for name in sorted({STAMPS, *(each.partition("/")[0] for each in _PHOTOGRAPHS)}):
        if (folder / name).exists():
            continue
        if not list(folder.glob(f"{name}_*.deb")):
            subprocess.run(["apt-get", "download", name], cwd=folder, check=True)  # noqa: S603, S607
        package = next(folder.glob(f"{name}_*.deb"))
        subprocess.run(["dpkg-deb", "-x", package, folder / f"{name}.part"], check=True)  # noqa: S603, S607
        (folder / f"{name}.part").rename(folder / name)


def photographs(folder: Path) -> list[tuple[str, Path]]:
    """Return the photographs' names and files."""
    found = []
    for place, names in _PHOTOGRAPHS.items():
        for pattern in names.split():
            paths = sorted((folder / place).glob(pattern))
            if len(paths) != 1:
                raise FileNotFoundError(f"{len(paths)} files {pattern!r} in {str(folder / place)!r}: want one")
            found.append((f"{place.partition('/')[0]}/{paths[0].relative_to(folder / place).as_posix()}", paths[0]))
    return found


def stamps(folder: Path) -> list[Stamp]:
    """Return all cut-outs of PNG files, in the order of their names."""
    root = folder / _STAMPS_FOLDER
    found = []
    for path in sorted(root.rglob("*.png")):
        with Image.open(path) as opened:
            if "A" not in opened.getbands() and "transparency" not in opened.info:
                continue
            image = opened.convert("RGBA")
        box = image.getchannel("A").point(lambda value: 255 * (value >= 128)).getbbox()
        if box is None or max(box[2] - box[0], box[3] - box[1]) < SIDE * _SMALLEST:
            continue
        name = path.relative_to(root).as_posix()
        found.append(Stamp(name=name, class_name=name.partition("/")[0], pixels=image.crop(box)))
    return found


def divided(units: Sequence[Sequence[str]], generator: np.random.Generator) -> dict[str, str]:
    """Return the part of each name; the names of a unit are in one part, and each part has a unit if there are three.

    Args:
        units: names that stay together.
        generator: draws.
    """
    total = sum(map(len, units))
    counts = dict.fromkeys(SHARES, 0)
    found = {}
    for number in generator.permutation(len(units)):
        part = max(SHARES, key=lambda part: (SHARES[part] - counts[part] / total) / SHARES[part])
        counts[part] += len(units[number])
        found.update(dict.fromkeys(units[number], part))
    return found


def alike(found: Sequence[Stamp]) -> list[list[str]]:
    """Return the names of the stamps of a class, in groups of those that look alike on white."""
    flat = []
    for each in found:
        white = Image.new("RGBA", each.pixels.size, "white")
        flat.append(np.asarray(Image.alpha_composite(white, each.pixels).convert("RGB")))
    near = near_pairs([signature_of(each) for each in flat], [(each.shape[1], each.shape[0]) for each in flat])
    first = list(range(len(found)))
    for one, other in zip(near.first.tolist(), near.second.tolist(), strict=True):
        low, high = sorted((first[one], first[other]))
        first = [low if each == high else each for each in first]
    groups: dict[int, list[str]] = defaultdict(list)
    for each, number in zip(found, first, strict=True):
        groups[number].append(each.name)
    return list(groups.values())


def parts_of(found: Sequence[Stamp], names: Sequence[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the part of each stamp and of each photograph."""
    generator = np.random.default_rng(_SEED)
    # Over all classes: equal stamps are in several of them.
    groups, of_name = alike(found), {each.name: each.class_name for each in found}
    by_class: dict[str, list[list[str]]] = defaultdict(list)
    for group in groups:
        by_class[of_name[group[0]]].append(group)
    own: dict[str, str] = {}
    for class_name in sorted(by_class):
        own |= divided(by_class[class_name], generator)
    return own, divided([[name] for name in names], generator)


def background(photograph: Image.Image, generator: np.random.Generator) -> Image.Image:
    """Return a random square of a photograph, at the pictures' size."""
    shorter = min(photograph.size)
    side = shorter * generator.uniform(min(1.0, SIDE / shorter), 1.0)
    left, top = ((each - side) * generator.random() for each in photograph.size)
    square = photograph.resize((SIDE, SIDE), Image.Resampling.BILINEAR, (left, top, left + side, top + side))
    return square.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if generator.random() < 0.5 else square


def turned(stamp: Stamp, generator: np.random.Generator) -> Image.Image:
    """Return a stamp at a random size and angle."""
    image = stamp.pixels
    longer = SIDE * np.exp(generator.uniform(np.log(_SMALLEST), np.log(_LARGEST)))
    factor = longer / max(image.size)
    size = tuple(max(1, round(each * factor)) for each in image.size)
    if generator.random() < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    # In premultiplied colours, so that what is transparent gives no edge.
    image = image.convert("RGBa").resize(size, Image.Resampling.BICUBIC if factor > 1 else Image.Resampling.BOX)
    image = image.convert("RGBA").rotate(generator.uniform(0, 360), Image.Resampling.BICUBIC, expand=True)
    box = image.getchannel("A").point(lambda value: 255 * (value >= 128)).getbbox()
    return image.crop(box) if box else image


def composed(
    photograph: Image.Image, chosen: Sequence[Stamp], generator: np.random.Generator
) -> tuple[Image.Image, list[tuple[Stamp, Any]]]:
    """Return a picture, and each stamp on it with its visible pixels, bool (side, side)."""
    canvas = background(photograph, generator)
    placed: list[tuple[Stamp, Any, int]] = []  # with the number of its pixels
    for stamp in chosen:
        image = turned(stamp, generator)
        if max(image.size) > SIDE:
            continue
        for _ in range(50):
            x, y = (int(generator.integers(0, SIDE - each + 1)) for each in image.size)
            mask = np.zeros((SIDE, SIDE), bool)
            mask[y : y + image.height, x : x + image.width] = np.asarray(image.getchannel("A")) >= 128
            whole = int(mask.sum())
            left = [other & ~mask for _, other, _ in placed]
            if whole and all(
                each.sum() >= (1 - _MOST_HIDDEN) * size for each, (*_, size) in zip(left, placed, strict=True)
            ):
                canvas.paste(image, (x, y), image)
                placed = [(one, each, size) for (one, _, size), each in zip(placed, left, strict=True)]
                placed.append((stamp, mask, whole))
                break
    return canvas, [(stamp, mask) for stamp, mask, _ in placed]


def generate(folder: Path, target: Path, part: str) -> str:
    """Write the pictures and labels of a part into the folder `target` if they are not there; return their digest.

    `target/PART.json` has the labels, and `target/images/PART` the pictures. The digest is of the labels and of the
    pictures' pixels.
    """
    labels = target / f"{part}.json"
    if not labels.exists():
        _generate(folder, target, part)
    return str(json.loads(labels.read_text())["info"]["digest"])


def _generate(folder: Path, target: Path, part: str) -> None:
    found, files = stamps(folder), photographs(folder)
    of_stamp, of_photograph = parts_of(found, [name for name, _ in files])
    among = [each for each in found if of_stamp[each.name] == part]
    classes = sorted({each.class_name for each in found})
    if missing := [name for name in classes if name not in {each.class_name for each in among}]:
        raise ValueError(f"part {part!r} has no stamp of the classes {', '.join(missing)}")
    opened = []
    for name, path in files:
        if of_photograph[name] == part:
            with Image.open(path) as image:
                image.draft("RGB", (_PHOTOGRAPH_SIDE, _PHOTOGRAPH_SIDE))
                whole = image.convert("RGB")
            factor = min(1.0, _PHOTOGRAPH_SIDE / min(whole.size))
            size = tuple(round(each * factor) for each in whole.size)
            opened.append((name, whole.resize(size, Image.Resampling.BOX)))
    images = target / "images" / part
    images.mkdir(parents=True, exist_ok=True)

    def made(number: int) -> tuple[str, str, list[tuple[Stamp, Any]]]:
        generator = np.random.default_rng((_SEED, list(SHARES).index(part), number))
        name, photograph = opened[int(generator.integers(len(opened)))]
        count = 0 if generator.random() < _EMPTY else int(generator.integers(1, 7))
        chosen = [among[int(generator.integers(len(among)))] for _ in range(count)]
        picture, placed = composed(photograph, chosen, generator)
        picture.save(images / f"{number:05}.jpg", quality=_QUALITY, subsampling=0)
        return name, hashlib.sha256(picture.tobytes()).hexdigest(), placed

    told: dict[str, Any] = {"images": [], "annotations": [], "categories": []}
    told["categories"] = [{"id": number, "name": name} for number, name in enumerate(classes, 1)]
    digest = hashlib.sha256()
    with ThreadPoolExecutor(1) as pool:
        for number, (name, pixels, placed) in enumerate(pool.map(made, range(PICTURES[part]))):
            file = f"images/{part}/{number:05}.jpg"
            # The part is the group: a split keeps it on one side.
            told["images"].append(
                {"id": number, "file_name": file, "width": SIDE, "height": SIDE, "group": part, "photograph": name}
            )
            digest.update(pixels.encode())
            for stamp, mask in placed:
                runs = run_lengths_of(mask)
                told["annotations"].append(
                    {
                        "id": len(told["annotations"]),
                        "image_id": number,
                        "category_id": classes.index(stamp.class_name) + 1,
                        "segmentation": {"size": [SIDE, SIDE], "counts": list(runs.runs)},
                        "bbox": list(_bounds(mask)),
                        "area": int(mask.sum()),
                        "iscrowd": 0,
                        "attributes": {"stamp": stamp.name},
                    }
                )
    digest.update(json.dumps(told, sort_keys=True).encode())
    told["info"] = {"digest": digest.hexdigest()}
    beside = target / f"{part}.part"
    beside.write_text(json.dumps(told))
    beside.rename(target / f"{part}.json")


def _bounds(mask: Any) -> tuple[int, int, int, int]:
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    return int(columns[0]), int(rows[0]), int(np.ptp(columns)) + 1, int(np.ptp(rows)) + 1
