"""`check` finds what was planted in a folder and nothing else, and splits divide no group."""

import json
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageEnhance

from multiring._cli import main
from multiring.errors import ArgumentError, DataError
from multiring.vision import Box, Label, VisionProject, check_project, make_split, read_split


def scene(seed: int) -> Image.Image:
    """Return a picture of coloured rectangles."""
    random = np.random.default_rng(seed)
    pixels = np.full((60, 80, 3), random.integers(60, 150, 3), np.uint8)
    for _ in range(12):
        y, x = random.integers(0, 50), random.integers(0, 70)
        pixels[y : y + random.integers(5, 30), x : x + random.integers(5, 40)] = random.integers(0, 200, 3)
    return Image.fromarray(pixels)


def with_pictures(folder: Path, number: int = 12) -> VisionProject:
    folder.mkdir(parents=True)
    for each in range(number):
        scene(each).save(folder / f"p{each:02}.png")
    project = VisionProject.create(folder)
    for name in ("cat", "dog"):
        project.add_class(name)
    return project


def label(project: VisionProject, labels: dict[str, str]) -> None:
    project.scan()
    project.set_many_labels({path: (Label(class_name=name),) for path, name in labels.items()}, "ann")


def kinds(project: VisionProject) -> dict[str, list[tuple[str, ...]]]:
    found: dict[str, list[tuple[str, ...]]] = {}
    for each in check_project(project, project.scan()).findings:
        found.setdefault(each.kind, []).append(each.pictures)
    return found


def test_a_good_folder_has_no_findings(tmp_path: Path) -> None:
    with with_pictures(tmp_path / "a") as project:
        label(project, {f"p{n:02}.png": "cat" if n % 2 else "dog" for n in range(12)})
        project.set_labels("p00.png", (), "ann")
        result = check_project(project, project.scan())
        assert not result.findings
        assert (result.pictures, result.usable, result.labelled, result.empty) == (12, 12, 12, 1)
        assert result.classes == {"cat": 6, "dog": 5}
        assert not result.has_errors


def test_everything_that_was_planted_is_found(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    with with_pictures(folder) as project:
        (folder / "same file.png").write_bytes((folder / "p00.png").read_bytes())
        scene(1).save(folder / "same pixels.bmp")
        ImageEnhance.Brightness(scene(2)).enhance(1.2).save(folder / "near.jpg", quality=70)
        (folder / "bad.jpg").write_bytes((folder / "p00.png").read_bytes()[:200])
        (folder / "out.png").symlink_to("/etc/passwd")
        (folder / "phone.HEIC").write_bytes(b"a picture of a phone")
        scene(20).convert("CMYK").save(folder / "cmyk.jpg")
        scene(21).save(folder / "png.gif", "PNG")
        scene(22).resize((8, 90)).save(folder / "slim.png")
        exif = Image.Exif()
        exif[274] = 6
        scene(23).save(folder / "turned.jpg", exif=exif.tobytes())
        label(
            project,
            {
                **{f"p{n:02}.png": "cat" for n in range(12)},
                "same file.png": "cat",
                "same pixels.bmp": "dog",
                "near.jpg": "cat",
            },
        )
        wide = Box(class_name="cat", left=70, top=0, width=20, height=5)
        project.set_labels("p05.png", (Label(class_name="cat"), wide), "ann", outside_too=True)
        project.add_class("bird")
        (folder / "p11.png").unlink()
        assert kinds(project) == {
            "unreadable": [("bad.jpg",)],
            "refused name": [()],
            "label outside": [("p05.png",)],
            "label conflict": [("p01.png", "same pixels.bmp")],
            "missing": [("p11.png",)],
            "format that is not read": [()],
            "equal files": [("p00.png", "same file.png")],
            "equal pixels": [("p01.png", "same pixels.bmp")],
            "near duplicates": [("near.jpg", "p02.png")],
            "class of one picture": [("same pixels.bmp",)],
            "imbalance": [()],
            "unused class": [()],
            "turned by EXIF": [("turned.jpg",)],
            "CMYK": [("cmyk.jpg",)],
            "smaller than 16 pixels": [("slim.png",)],
            "longer than 10 times its width": [("slim.png",)],
            "ending of another format": [("png.gif",)],
        }


def test_near_duplicates_conflict_by_their_classes(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    with with_pictures(folder, 4) as project:
        for name in ("near.jpg", "nearer.jpg"):
            scene(2).save(folder / name, quality=70 if name == "near.jpg" else 90)
        label(project, {"p02.png": "cat", "near.jpg": "dog", "nearer.jpg": "cat", "p01.png": "dog"})
        assert kinds(project)["label conflict"] == [("near.jpg", "nearer.jpg", "p02.png")]
        box = Box(class_name="cat", left=1, top=1, width=20, height=5)
        for path, left in (("near.jpg", 2.0), ("nearer.jpg", 3.0), ("p02.png", 1.0)):
            project.set_labels(path, (Box(class_name="cat", left=left, top=1, width=20, height=5), box), "ann")
        assert "label conflict" not in kinds(project)  # boxes of near duplicates may be elsewhere


def test_frames_of_a_video_are_no_duplicates(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    with with_pictures(folder, 3) as project:
        for number, quality in enumerate((60, 70, 80)):
            scene(9).save(folder / f"frame{number}.jpg", quality=quality)
        project.scan()
        assert [len(each) for each in kinds(project)["near duplicates"]] == [3]
        for number in range(3):
            project.set_frame(f"frame{number}.jpg", "film", number)
        found = check_project(project, project.scan()).findings
        assert [each.text for each in found if each.kind == "video"] == [
            "video 'film': 3 frames, 3 pairs of near duplicates; a split keeps it together"
        ]
        assert "near duplicates" not in {each.kind for each in found}


def planted(folder: Path) -> VisionProject:
    """Return a labelled project in which p00 to p05 are tied by a chain of five kinds of links."""
    project = with_pictures(folder, 30)
    scene(1).save(folder / "p00.png")  # equal to p01
    (folder / "copy.png").write_bytes((folder / "p02.png").read_bytes())
    scene(3).save(folder / "near.jpg", quality=60)
    label(project, {f"p{n:02}.png": "cat" if n % 3 else "dog" for n in range(30)} | {"copy.png": "cat"})
    project.set_group("p01.png", "g")
    project.set_group("p02.png", "g")
    project.set_frame("copy.png", "film", 1)
    project.set_frame("p03.png", "film", 7)
    project.set_group("near.jpg", "h")  # not labelled, and connects p03 and p05
    project.set_group("p05.png", "h")
    return project


@pytest.mark.parametrize("seed", range(6))
def test_no_link_is_on_two_sides(tmp_path: Path, seed: int) -> None:
    with planted(tmp_path / "a") as project:
        made = make_split(project, {"train": 0.6, "val": 0.2, "test": 0.2}, seed=seed)
        of = {path: part for part, paths in made.parts.items() for path in paths}
        assert len(of) == 31
        assert "near.jpg" not in of
        together = ("p00.png", "p01.png", "p02.png", "copy.png", "p03.png", "p05.png")
        assert len({of[path] for path in together}) == 1
        assert made.units == 31 - len(together) + 1
        assert all(made.parts.values())
        assert read_split(project) == made
        assert make_split(project, {"train": 0.6, "val": 0.2, "test": 0.2}, seed=seed) == made


def test_near_duplicates_of_one_product_can_be_divided(tmp_path: Path) -> None:
    with planted(tmp_path / "a") as project:
        project.set_group("near.jpg", None)
        label(project, {"near.jpg": "dog"})
        shares = {"train": 0.5, "test": 0.5}
        whole = make_split(project, shares)
        divided = make_split(project, shares, name="divided", divide_near=True)
        assert (whole.divides_near, divided.divides_near) == (False, True)
        assert divided.units == whole.units + 1  # only near.jpg is by itself: equal pixels, groups, videos are not
        assert read_split(project, "divided") == divided
    words = ["vision", "split", str(tmp_path / "a"), "--name", "again", "--shares", "train=0.5,test=0.5"]
    assert main([*words, "--divide-near"]) == 0
    with VisionProject.open(tmp_path / "a") as project:
        assert read_split(project, "again").digest == divided.digest
    assert main([*words[:-3], "twice", "--shares", "train=0.5,test=0.2,train=0.5"]) == 2


def test_near_duplicates_that_came_into_two_parts_are_found(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    with with_pictures(folder, 8) as project:
        label(project, {f"p{n:02}.png": "cat" if n % 2 else "dog" for n in range(8)})
        parts = make_split(project, {"train": 0.5, "test": 0.5}).parts
        make_split(project, {"train": 0.5, "test": 0.5}, name="near", divide_near=True)
        assert "divided by a split" not in kinds(project)
        one, other = parts["train"][0], parts["test"][0]
        with Image.open(folder / one) as picture:
            picture.resize((picture.width * 3 // 4, picture.height * 3 // 4)).save(folder / other)
        project.scan()
        assert kinds(project)["divided by a split"] == [tuple(sorted((one, other)))]
        [found] = [each for each in check_project(project).findings if each.kind == "divided by a split"]
        assert found.severity == "warning"
        assert f"{other!r} in 'test', {one!r} in 'train'" in found.text
        (project.runs / "splits" / "near.json").write_text("{}")
        assert kinds(project)["damaged split"] == [()]


def test_a_split_is_not_replaced_and_its_labels_are_known(tmp_path: Path) -> None:
    with planted(tmp_path / "a") as project:
        shares = {"train": 0.5, "test": 0.5}
        first = make_split(project, shares)
        with pytest.raises(ArgumentError, match=r"split\.json' is there already.*Give another name"):
            make_split(project, shares, seed=1)
        assert make_split(project, shares, seed=1, name="other").digest != first.digest
        project.set_labels("p09.png", (Label(class_name="cat"), Label(class_name="dog")), "ann")
        assert make_split(project, shares, name="later").labels_digest != first.labels_digest
        path = project.runs / "splits" / "split.json"
        path.write_text(path.read_text().replace('"p00.png",', "", 1))
        with pytest.raises(DataError, match="was changed: its parts do not have its digest"):
            read_split(project)
        path.write_text("{}")
        with pytest.raises(DataError, match="is no split, or damaged"):
            read_split(project)
        with pytest.raises(DataError, match="has no split 'none'"):
            read_split(project, "none")
        with pytest.raises(ArgumentError, match="want a name of letters"):
            make_split(project, shares, name="../x")


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_command_checks_and_splits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "a"
    with with_pictures(folder, 5) as project:
        name = "<b> & 'copy'.png"
        (folder / name).write_bytes((folder / "p00.png").read_bytes())
        label(project, {f"p{n:02}.png": "cat" for n in range(5)})
    said = told(capsys, "check", str(folder))
    assert said[0] == 0
    assert f"warning: equal files: 2 equal files: {name!r}, 'p00.png'" in said[1]
    page = _Page()
    page.feed((folder / "runs" / "check.html").read_text())
    assert [each for each in page.tags if each[0] in {"script", "b", "link"}] == []
    sources = [each["src"] or "" for tag, each in page.tags if tag == "img"]
    assert len(sources) == 2
    assert all(each.startswith("data:image/jpeg;base64,") for each in sources)
    assert name in page.text
    code, text = told(capsys, "check", str(folder), "--json")
    assert code == 0
    found = json.loads(text)
    assert (found["pictures"], found["labelled"], found["classes"]) == (6, 5, {"cat": 5, "dog": 0})
    assert found["findings"][0]["pictures"] == [name, "p00.png"]
    code, text = told(capsys, "split", str(folder), "--shares", "train=0.6,val=0.4", "--seed", "3")
    assert code == 0
    assert text.startswith("train: 3 pictures\nval: 2 pictures\n5 groups that stay together, digest ")
    code, text = told(capsys, "split", str(folder), "--shares", "train=0.6,val=0.4", "--seed", "3", "--json")
    assert sum(map(len, json.loads(text)["parts"].values())) == 5
    (folder / "bad.png").write_bytes(b"")
    assert told(capsys, "check", str(folder))[0] == 1


def told(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = main(["vision", *words])
    return code, capsys.readouterr().out


def test_a_folder_without_a_project_becomes_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scene(1).save(tmp_path / "a.png")
    assert told(capsys, "check", str(tmp_path))[0] == 0
    assert VisionProject.is_project(tmp_path)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (lambda path: ["check", str(path / "none")], "is no folder: want the folder with the pictures"),
        (lambda path: ["check", str(path), "--threads", "0"], "--threads 0: want a whole number, 1 to"),
        (lambda path: ["split", str(path)], "has no labelled picture"),
        (lambda path: ["split", str(path), "--shares", "train"], "want NAME=SHARE"),
        (lambda path: ["split", str(path), "--shares", "train=x"], "want NAME=SHARE"),
    ],
)
def test_the_command_says_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: Callable[[Path], list[str]], text: str
) -> None:
    assert main(["vision", *words(tmp_path)]) == 2
    error: Any = capsys.readouterr().err
    assert text in error


def test_a_project_inside_is_told_and_its_results_are_no_pictures(tmp_path: Path) -> None:
    with with_pictures(tmp_path / "outer", 2) as project:
        with with_pictures(tmp_path / "outer" / "inner", 1) as inner:
            scene(7).save(inner.runs / "result.png")
        scene(8).save(project.runs / "result.png")
        (tmp_path / "outer" / "plain" / "runs").mkdir(parents=True)
        scene(9).save(tmp_path / "outer" / "plain" / "runs" / "r.png")  # a folder of this name is no result by itself
        found = check_project(project, project.scan())
        assert [each.path for each in project.images()] == ["inner/p00.png", "p00.png", "p01.png", "plain/runs/r.png"]
        [told] = [each.text for each in found.findings if each.kind == "project inside"]
        assert told.startswith(
            "folder 'inner' is a project of its own: its pictures count in this one, too, but not its"
        )


def test_what_is_gone_does_not_count(tmp_path: Path) -> None:
    """A class whose pictures are gone has none; a picture that nobody labelled may go."""
    with with_pictures(tmp_path / "a", 5) as project:
        label(project, {"p00.png": "cat", "p01.png": "cat", "p02.png": "dog"})
        for name in ("p02.png", "p04.png"):
            (project.folder / name).unlink()
        project.scan()
        result = check_project(project)
        assert dict(result.classes) == {"cat": 2, "dog": 0}
        assert {each.kind: each.pictures for each in result.findings} == {"missing": ("p02.png",), "unused class": ()}
