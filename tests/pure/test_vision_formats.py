"""Formats of labels: what is exported is read back, and a file that contradicts itself or leads away is an error."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from multiring._cli import main
from multiring.errors import ArgumentError, DataError
from multiring.vision import Box, Label, Mask, Polygon, VisionProject, export_labels, import_labels, run_lengths_of

FORMATS = ("coco", "csv", "imagefolder", "masks", "voc", "yolo")
KINDS = {
    "coco": ("box", "polygon", "mask"),
    "csv": ("class", "box"),
    "imagefolder": ("one class",),
    "masks": ("one mask",),
    "voc": ("box",),
    "yolo": ("box", "outline"),
}
NAMES = ("a.png", "ü ñ/東京.png", "b c/d'e&<f>.jpg", "deep/er/x.y.z.png", "#%20;,=.png", "-n.bmp", "twice/a.png")
CLASSES = ("Hund & Katze", "東京", 'a, "b"', "unused", "x:y #1")
WIDTH, HEIGHT = 37, 23


def drawn(random: np.random.Generator, kind: str) -> Label:
    name = CLASSES[random.integers(0, 3)]
    if kind == "class":
        return Label(class_name=name)
    left, top = random.uniform(0, 20), random.uniform(0, 10)
    if kind == "box":
        if random.random() < 0.5:
            return Box(class_name=name, left=round(left), top=round(top), width=3, height=4)
        return Box(class_name=name, left=left, top=top, width=random.uniform(1, 9), height=random.uniform(1, 9))
    if kind in {"polygon", "outline"}:
        count = 1 if kind == "outline" else int(random.integers(1, 3))
        outlines = tuple(
            tuple(map(tuple, random.uniform(0, 20, (random.integers(3, 7), 2)).tolist())) for _ in range(count)
        )
        return Polygon(class_name=name, outlines=outlines)
    pixels = random.random((HEIGHT, WIDTH)) < random.uniform(0.05, 0.9)
    pixels[0, 0] = True
    return Mask(class_name=name, pixels=run_lengths_of(pixels), is_crowd=bool(random.random() < 0.5))


def labels_of(random: np.random.Generator, format_name: str) -> tuple[Label, ...]:
    """Return labels that a format holds; half of the pictures of most formats have none."""
    kinds = KINDS[format_name]
    if kinds == ("one class",):
        return (Label(class_name=CLASSES[random.integers(0, 3)]),)
    if random.random() < 0.3:
        return ()
    if kinds == ("one mask",):
        values = random.integers(0, 4, (HEIGHT, WIDTH))
        values[0, :3] = (1, 2, 3)
        return tuple(Mask(class_name=CLASSES[n - 1], pixels=run_lengths_of(values == n)) for n in (1, 2, 3))
    made = tuple(drawn(random, kinds[random.integers(0, len(kinds))]) for _ in range(random.integers(1, 5)))
    if format_name in {"coco", "voc", "csv"}:
        made = tuple(
            replace(each, track="t 1", attributes=(("difficult", "1"), ("pose", "links & rechts")))
            if number % 2
            else each
            for number, each in enumerate(made)
        )
    return made


def filled(folder: Path, seed: int, format_name: str) -> VisionProject:
    random = np.random.default_rng(seed)
    for name in NAMES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 256, (HEIGHT, WIDTH, 3), np.uint8)).save(folder / name)
    project = VisionProject.create(folder)
    project.scan()
    for name in CLASSES:
        project.add_class(name)
    # The last picture is not labelled.
    labels = {each.path: labels_of(random, format_name) for each in project.images()[:-1]}
    project.set_many_labels(labels, "ann")
    project.set_group(NAMES[0], "patient 1")
    project.set_frame(NAMES[1], "film", 0)
    return project


def near(one: Label, other: Label) -> bool:
    """Return whether labels agree, up to the rounding of formats that store other numbers than pixels."""
    numbers = [np.array(_numbers(each)) for each in (one, other)]
    if numbers[0].shape != numbers[1].shape or not np.allclose(numbers[0], numbers[1], rtol=0, atol=1e-9):
        return False
    if isinstance(one, Mask):
        return one == other
    told = [(type(each), each.class_name, each.track, each.attributes) for each in (one, other)]
    return told[0] == told[1]


def _numbers(label: Label) -> list[float]:
    if isinstance(label, Box):
        return [label.left, label.top, label.width, label.height]
    if isinstance(label, Polygon):
        return [number for outline in label.outlines for point in outline for number in point]
    return []


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("format_name", FORMATS)
def test_a_round_trip_keeps_labels_and_pictures(tmp_path: Path, format_name: str, seed: int) -> None:
    with filled(tmp_path / "one", seed, format_name) as first, VisionProject.create(tmp_path / "two") as second:
        export_labels(first, tmp_path / "out", format_name)
        done = import_labels(second, tmp_path / "out", format_name, "bob")
        assert done.pictures == done.copied == len(NAMES) - 1
        wanted, found = first.labellings(), second.labellings()
        images = {each.digest: each for each in second.images()}
        assert len(images) == len(NAMES) - 1
        for each in first.images()[:-1]:
            copy = images[each.digest]
            if format_name != "imagefolder":
                assert copy.path == each.path
            labels, copies = wanted[each.path].labels, found[copy.path].labels
            assert labels is not None
            assert copies is not None
            assert len(labels) == len(copies)
            assert all(map(near, labels, copies)), (labels, copies)
            assert found[copy.path].author == "bob"
            if format_name in {"coco", "csv"}:
                assert (copy.group, copy.video, copy.frame) == (each.group, each.video, each.frame)
        if format_name == "imagefolder":
            assert sorted(second.classes()) == sorted(CLASSES)
        else:
            assert second.classes() == CLASSES
        # A second import finds the pictures in place, and one undo takes it back.
        again = import_labels(second, tmp_path / "out", format_name, "bob")
        assert (again.copied, again.labels) == (0, done.labels)
        second.undo("bob")
        second.undo("bob")
        assert all(each.labels is None for each in second.labellings().values())


@pytest.mark.parametrize("format_name", ["csv", "voc", "yolo"])
def test_polygons_and_masks_become_boxes_if_asked(tmp_path: Path, format_name: str) -> None:
    with filled(tmp_path / "one", 1, "coco") as project:
        with pytest.raises(
            ArgumentError, match=r"has a label of the kind (Polygon|Mask): .* holds .*export boxes around"
        ):
            export_labels(project, tmp_path / "out", format_name)
        assert [each.name for each in tmp_path.iterdir()] == ["one"]
        export_labels(project, tmp_path / "out", format_name, boxes=True)
    with VisionProject.create(tmp_path / "two") as second:
        import_labels(second, tmp_path / "out", format_name, "bob")
        assert {type(label) for each in second.labellings().values() for label in each.labels or ()} == {Box}


def test_a_folder_that_is_the_project_stays_in_place(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        (tmp_path / "set" / name).mkdir(parents=True)
        Image.new("RGB", (9, 9), (name == "cat" and "red") or "blue").save(tmp_path / "set" / name / "a.png")
    for folder, source, prefix in ((tmp_path, tmp_path / "set", "set/"), (tmp_path / "set", tmp_path / "set", "")):
        with VisionProject.create(folder) as project:
            assert import_labels(project, source, "imagefolder", "ann").copied == 0
            assert {path: each.labels for path, each in project.labellings().items()} == {
                f"{prefix}cat/a.png": (Label(class_name="cat"),),
                f"{prefix}dog/a.png": (Label(class_name="dog"),),
            }


def test_results_are_no_class(tmp_path: Path) -> None:
    (tmp_path / "cat").mkdir()
    Image.new("RGB", (9, 9)).save(tmp_path / "cat" / "a.png")
    with VisionProject.create(tmp_path) as project:
        (project.runs / "first").mkdir(parents=True)
        Image.new("RGB", (9, 9)).save(project.runs / "first" / "curve.png")
        assert import_labels(project, tmp_path, "imagefolder", "ann").pictures == 1
        assert project.classes() == ("cat",)


def test_class_folders_without_a_picture_are_refused(tmp_path: Path) -> None:
    (tmp_path / "set" / "cat").mkdir(parents=True)
    with (
        VisionProject.create(tmp_path / "one") as project,
        pytest.raises(DataError, match="set' has no picture: want pictures in a folder for each class"),
    ):
        import_labels(project, tmp_path / "set", "imagefolder", "ann")


def coco(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    told: dict[str, Any] = {
        "images": [{"id": 1, "file_name": "a.png", "width": WIDTH, "height": HEIGHT}],
        "annotations": [{"id": 1, "image_id": 1, "category_id": 5, "bbox": [1, 2, 3, 4]}],
        "categories": [{"id": 5, "name": "cat"}],
    }
    change(told)
    (folder / "annotations.json").write_text(json.dumps(told))


def written(path: str, text: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)

    return write


def both(*makers: Callable[[Path], None]) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        for make in makers:
            make(folder)

    return write


def of_coco(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    return lambda folder: coco(folder, change)


def annotation(**values: Any) -> Callable[[Path], None]:
    return of_coco(lambda told: told["annotations"][0].update(values))


def xml(
    body: str, size: str = f"<size><width>{WIDTH}</width><height>{HEIGHT}</height></size>"
) -> Callable[[Path], None]:
    return written("Annotations/a.xml", f"<annotation>{size}{body}</annotation>")


BOX = "<bndbox><xmin>2</xmin><ymin>2</ymin><xmax>5</xmax><ymax>6</ymax></bndbox>"
YAML = written("data.yaml", "names: [cat, dog]\n")
MASK_CLASSES = written("classes.txt", "0 background\n1 cat\n")


def mask(values: np.ndarray[Any, Any]) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "masks").mkdir()
        Image.fromarray(values).save(folder / "masks" / "a.png")

    return both(MASK_CLASSES, write)


BAD = [
    ("coco", written("annotations.json", "{"), r"annotations\.json': malformed: JSONDecodeError"),
    ("coco", written("annotations.json", "[]"), r"annotations\.json': malformed"),
    ("coco", annotation(image_id=9), r"annotations\[0\]: image_id 9 is the id of no image"),
    ("coco", annotation(category_id=9), r"annotations\[0\]: category_id 9 is the id of no category"),
    ("coco", annotation(bbox=[1, 2, 0, 4]), r"annotations\[0\]: box of 0 x 4 pixels"),
    ("coco", annotation(bbox=[1, 2]), r"annotations\[0\]: bbox \[1, 2\]: want four numbers"),
    ("coco", annotation(bbox=["1", 2, 3, 4]), r"annotations\[0\]: bbox .*: want four numbers"),
    ("coco", annotation(segmentation=[[9, 9, 12, 9, 12, 12]]), r"annotations\[0\]: bbox .* nothing in common"),
    ("coco", annotation(segmentation=[[1, 2, 3, 2, 3, 4]], bbox=[1, 2, float("nan"), 3]), "nothing in common"),
    ("coco", written("annotations.json", "[" * 100_000), r"annotations\.json': malformed: RecursionError"),
    ("coco", of_coco(lambda told: told["categories"][0].update(name=None)), r"categories\[0\]: name None: want a text"),
    ("coco", of_coco(lambda told: told["categories"][0].update(name=" cat")), "class ' cat' has a space at an end"),
    ("coco", of_coco(lambda told: told.update(images=[], annotations=[])), "has labels of no picture"),
    ("coco", annotation(segmentation=[[1, 2, 3]]), r"annotations\[0\]: polygon of 3 numbers"),
    ("coco", annotation(segmentation=[[1, 2, 3, 4]]), r"annotations\[0\]: polygon: .* three points"),
    ("coco", annotation(segmentation={"size": [5, 5], "counts": [25]}), r"mask of 5 x 5 pixels on an image of 37 x 23"),
    ("coco", annotation(segmentation={"size": [HEIGHT, WIDTH], "counts": [1]}), r"\[0\]: run lengths add up to 1"),
    ("coco", annotation(segmentation={"size": [HEIGHT, WIDTH], "counts": "é"}), r"\[0\]: compressed run lengths have"),
    (
        "coco",
        of_coco(lambda told: told["annotations"].append(told["annotations"][0])),
        r"annotations\[1\]: id 1 .* two",
    ),
    (
        "coco",
        of_coco(lambda told: told["images"].append({**told["images"][0], "id": 2})),
        r"images\[1\]: .* also images\[0\]",
    ),
    ("coco", of_coco(lambda told: told["images"].append(told["images"][0])), r"images\[1\]: id 1 is the id of two"),
    (
        "coco",
        of_coco(lambda told: told["categories"].append({"id": 6, "name": "cat"})),
        "two categories have the name 'cat'",
    ),
    (
        "coco",
        of_coco(lambda told: told["images"][0].update(width=9)),
        "states 9 x 23 pixels for 'a.png', which has 37 x 23",
    ),
    (
        "coco",
        of_coco(lambda told: told["images"][0].update(file_name="b.png")),
        r"images\[0\] names picture 'b.png', and",
    ),
    (
        "coco",
        of_coco(lambda told: told["images"][0].update(file_name="../a.png")),
        r"'\.\./a\.png', a path that leads out",
    ),
    ("coco", of_coco(lambda told: told["images"][0].update(file_name="/etc/passwd")), "a path that leads out"),
    ("coco", of_coco(lambda told: told["images"][0].update(file_name="link.png")), "'link.png', a link that leads out"),
    ("csv", written("labels.csv", "file,class\n"), "has the columns file, class: want path and class"),
    ("csv", written("labels.csv", "path,class\na.png\n"), r"labels\.csv', line 2: has 1 values: want 2"),
    ("csv", written("labels.csv", "path,class\n"), "has labels of no picture"),
    ("csv", written("labels.csv", "path,class\n../a.png,cat\n"), r"line 2 names '\.\./a\.png', a path that leads out"),
    (
        "csv",
        written("labels.csv", "path,class\na.png,cat\na.png,\n"),
        r"line 3: picture 'a\.png' has a label, and line 3 says",
    ),
    (
        "csv",
        written("labels.csv", "path,class\na.png,\na.png,cat\n"),
        r"line 3: picture 'a\.png' has a label, and line 2 says",
    ),
    ("csv", written("labels.csv", "path,class,left\na.png,cat,1\n"), "line 2: has the coordinates .* want all four"),
    (
        "csv",
        written("labels.csv", "path,class,group\na.png,cat,g\na.png,cat,h\n"),
        r"line 3: picture .*\('h', '', ''\)",
    ),
    ("csv", written("labels.csv", "path,class,frame\na.png,cat,3\n"), "'a.png' has a frame, and no video: give both"),
    ("csv", written("labels.csv", "path,class,video\na.png,cat,v\n"), "'a.png' has a video, and no frame: give both"),
    ("csv", written("labels.csv", "path,class,video,frame\na.png,cat,v,-1\n"), "'a.png' is the frame -1: want a whole"),
    (
        "csv",
        both(
            written("images/b.png", ""), written("labels.csv", "path,class,video,frame\na.png,cat,v,1\nb.png,cat,v,1\n")
        ),
        "b.png' is empty",
    ),
    ("coco", of_coco(lambda told: told["images"][0].update(video=3, frame=1.5)), "is the frame 1.5: want a whole"),
    ("coco", of_coco(lambda told: told["images"][0].update(group=[1])), r"has the group \[1\]: want a text"),
    ("csv", written("labels.csv", 'path,class\na.png,"cat\n'), r"labels\.csv', line 2: unexpected end of data"),
    ("imagefolder", written("readme", ""), r"images/a\.png' is in no folder|a\.png' is in no folder of a class"),
    ("voc", xml("<object>" + BOX + "</object>"), r"a\.xml': object 0: has no name"),
    ("voc", xml("<object><name>cat</name></object>"), "object 0: has no bndbox/xmin"),
    ("voc", xml("<filename>b.png</filename>"), r"states filename 'b\.png', and its own name belongs to 'a\.png'"),
    ("voc", xml("", size=""), "has no size/width"),
    ("voc", xml("", size="<size><width>9</width><height>9</height></size>"), "states 9 x 9 pixels for 'a.png'"),
    ("voc", xml("<object>"), r"a\.xml': is no XML"),
    ("voc", written("Annotations/a.xml", "<!DOCTYPE a [<!ENTITY b 'c'>]><a/>"), "declares a document type or entities"),
    ("voc", written("Annotations/b.xml", "<annotation/>"), r"b\.xml' belongs to no picture"),
    ("yolo", both(YAML, written("labels/a.txt", "2 0.5 0.5 0.1 0.1\n")), r"a\.txt', line 1: class 2: want 0 to 1"),
    ("yolo", both(YAML, written("labels/a.txt", "\n0 0.5 0.5 0.1\n")), r"a\.txt', line 2: 3 numbers after the class"),
    ("yolo", both(YAML, written("labels/a.txt", "0 x 0.5 0.1 0.1\n")), r"a\.txt', line 1: malformed"),
    ("yolo", both(YAML, written("labels/b.txt", "")), r"b\.txt' belongs to no picture"),
    ("yolo", written("data.yaml", "names: [cat, cat]\n"), "names has a class twice"),
    ("yolo", written("data.yaml", "nc: 3\nnames: [cat]\n"), "nc is 3, and names has 1 classes"),
    ("yolo", written("data.yaml", "names: {0: cat, 2: dog}\n"), r"names has the numbers \[0, 2\]: want 0 to 1"),
    ("yolo", written("data.yaml", "names: [\n"), "is no YAML"),
    ("yolo", written("data.yaml", "names: cat\n"), "names is 'cat': want a list of names"),
    ("yolo", YAML, "has labels of no picture"),
    ("yolo", written("labels/a.txt", ""), r"data\.yaml' cannot be read: No such file"),
    ("masks", mask(np.full((HEIGHT, WIDTH), 7, np.uint8)), r"a\.png': has 7 at \(0, 0\): want 0 or a number"),
    ("masks", mask(np.zeros((5, 5), np.uint8)), "has 5 x 5 pixels, and its picture 37 x 23"),
    ("masks", mask(np.zeros((HEIGHT, WIDTH, 3), np.uint8)), "has the mode 'RGB': want a grey or palette PNG"),
    ("masks", written("classes.txt", "1 cat\n1 dog\n"), r"classes\.txt', line 2: '1 dog': want a number of 0 to 255"),
    (
        "masks",
        written("classes.txt", "cat\n"),
        r"classes\.txt', line 1: 'cat': want the number of the class in the masks",
    ),
    ("masks", both(MASK_CLASSES, written("masks/a.jpg", "")), r"a\.jpg' is no PNG"),
    ("masks", both(MASK_CLASSES, written("masks/b.png", "")), r"b\.png' belongs to no picture"),
    ("masks", both(MASK_CLASSES, written("masks/a.png", "")), r"a\.png': cannot be decoded"),
]


@pytest.mark.parametrize(("format_name", "make", "words"), BAD)
def test_a_bad_file_is_named_and_nothing_is_imported(
    tmp_path: Path, format_name: str, make: Callable[[Path], None], words: str
) -> None:
    source = tmp_path / "source"
    pictures = source / {"voc": "JPEGImages", "imagefolder": "."}.get(format_name, "images")
    pictures.mkdir(parents=True)
    Image.new("RGB", (WIDTH, HEIGHT)).save(pictures / "a.png")
    if format_name == "coco":
        Image.new("RGB", (WIDTH, HEIGHT)).save(tmp_path / "other.png")
        (pictures / "link.png").symlink_to(tmp_path / "other.png")
    make(source)
    with VisionProject.create(tmp_path / "project") as project:
        with pytest.raises(DataError, match=words):
            import_labels(project, source, format_name, "ann")
        assert not project.images()
        assert not project.classes()
    assert {each.name.partition("-")[0] for each in (tmp_path / "project").iterdir()} == {"labels.sqlite"}


@pytest.mark.parametrize("format_name", FORMATS)
def test_all_pictures_that_cannot_be_read_are_counted(tmp_path: Path, format_name: str) -> None:
    folder = tmp_path / "first"
    folder.mkdir()
    for number in range(8):
        Image.new("RGB", (WIDTH, HEIGHT), (number, 0, 0)).save(folder / f"{number}.png")
    random = np.random.default_rng(0)
    with VisionProject.create(folder) as project:
        project.scan()
        for name in CLASSES:
            project.add_class(name)
        for number in range(8):
            project.set_labels(f"{number}.png", labels_of(random, format_name), "ann")
        export_labels(project, tmp_path / "out", format_name)
    damaged = sorted(each for each in (tmp_path / "out").rglob("*.png") if each.parent.name != "masks")[:7]
    with VisionProject.create(tmp_path / "second") as project:
        for count, path in enumerate(damaged, 1):
            path.write_bytes(b"no picture")
            with pytest.raises(DataError) as caught:
                import_labels(project, tmp_path / "out", format_name, "ann")
            words = str(caught.value)
            assert words.count("is no picture that multiring reads") == min(count, 5)
            assert words.startswith(f"{count} pictures cannot be read: " if count > 1 else "picture ")
            assert ("; and 2 more. " in words) == (count == 7)
            assert words.endswith("Repair or remove what cannot be read, and import again")
        assert not project.images()


def test_other_programs_files_are_read(tmp_path: Path) -> None:
    """The forms that our export does not write: block lists, a palette, compressed run lengths, a byte order mark."""
    for name in ("a", "b"):
        for folder in ("images", "JPEGImages"):
            (tmp_path / folder).mkdir(exist_ok=True)
            Image.new("RGB", (4, 3), (name == "a" and "red") or "blue").save(tmp_path / folder / f"{name}.png")
    written("data.yaml", "names:\n  0: cat\n  1: dog\n")(tmp_path)
    written("labels/a.txt", "1 0.5 0.5 0.5 1\n")(tmp_path)
    written(
        "Annotations/a.xml",
        f"<annotation><size><width>4</width><height>3</height></size><object><name>dog</name>"
        f"<difficult>0</difficult>{BOX}</object></annotation>",
    )(tmp_path)
    (tmp_path / "labels.csv").write_bytes(b"\xef\xbb\xbfclass,path\r\ndog,a.png\r\n")
    coco_text = {
        "images": [{"id": "x", "file_name": "a.png", "width": 4, "height": 3, "license": 1}],
        "categories": [{"id": 9, "name": "dog", "supercategory": "animal"}],
        "annotations": [
            {"image_id": "x", "category_id": 9, "iscrowd": 1, "segmentation": {"size": [3, 4], "counts": "417"}}
        ],
    }
    (tmp_path / "annotations.json").write_text(json.dumps(coco_text))
    palette = Image.new("P", (4, 3))
    palette.putpalette([0, 0, 0, 9, 9, 9, 128, 0, 0])
    palette.putpixel((1, 2), 2)
    (tmp_path / "masks").mkdir()
    palette.save(tmp_path / "masks" / "a.png")
    (tmp_path / "classes.txt").write_text("0 background\n2 dog\n")
    spot = np.zeros((3, 4), bool)
    spot[2, 1] = True
    wanted: dict[str, Label] = {
        "yolo": Box(class_name="dog", left=1, top=0, width=2, height=3),
        "voc": Box(class_name="dog", left=1, top=1, width=4, height=5, attributes=(("difficult", "0"),)),
        "csv": Label(class_name="dog"),
        "masks": Mask(class_name="dog", pixels=run_lengths_of(spot)),
    }
    for format_name, label in wanted.items():
        with VisionProject.create(tmp_path / f"project {format_name}") as project:
            import_labels(project, tmp_path, format_name, "ann")
            assert {path: each.labels for path, each in project.labellings().items()} == {"a.png": (label,)}
    with VisionProject.create(tmp_path / "project coco") as project:
        import_labels(project, tmp_path, "coco", "ann")
        (found,) = project.labellings()["a.png"].labels or ()
        assert isinstance(found, Mask)
        assert found.pixels.runs == (4, 1, 7)


def test_every_form_of_a_crowd_stays_a_crowd(tmp_path: Path) -> None:
    """Other programs state crowds with boxes and outlines, too; an object of it would be learnt and scored."""
    (tmp_path / "images").mkdir()
    Image.new("RGB", (4, 3)).save(tmp_path / "images" / "a.png")
    common = {"image_id": 1, "category_id": 1}
    outline = [0.0, 0.0, 2.0, 0.0, 2.0, 3.0, 0.0, 3.0]
    told = {
        "images": [{"id": 1, "file_name": "a.png", "width": 4, "height": 3}],
        "categories": [{"id": 1, "name": "dog"}],
        "annotations": [
            {**common, "iscrowd": 1, "bbox": [1.5, 0, 2.5, 1.2], "attributes": {"track": "7"}},
            {**common, "iscrowd": 1, "segmentation": [outline]},
            {**common, "iscrowd": 1, "segmentation": [[0, 0.1, 4, 0.1, 4, 0.2]]},
            {**common, "iscrowd": 0, "bbox": [1, 1, 2, 2]},
        ],
    }
    (tmp_path / "annotations.json").write_text(json.dumps(told))
    with VisionProject.create(tmp_path / "project") as project:
        import_labels(project, tmp_path, "coco", "ann")
        box, area, line, one = project.labellings()["a.png"].labels or ()
        export_labels(project, tmp_path / "out", "coco")
    assert isinstance(box, Mask)
    assert isinstance(area, Mask)
    assert isinstance(line, Mask)
    assert isinstance(one, Box)
    assert (box.is_crowd, area.is_crowd, line.is_crowd) == (True, True, True)
    assert box.track == "7"
    assert box.pixels.pixels().tolist() == [[False, True, True, True]] * 2 + [[False] * 4]
    assert area.pixels.pixels().tolist() == [[True, True, False, False]] * 3
    assert line.bounds() == (0, 0, 4, 1)
    written = json.loads((tmp_path / "out" / "annotations.json").read_text())["annotations"]
    assert [each["iscrowd"] for each in written] == [1, 1, 1, 0]
    told["annotations"] = [{**common, "iscrowd": 1, "bbox": [2, 0, 3, 1]}]
    (tmp_path / "annotations.json").write_text(json.dumps(told))
    with (
        VisionProject.create(tmp_path / "other") as project,
        pytest.raises(DataError, match=r"annotations\[0\].*box from \(2, 0\) to \(5, 1\) on a picture of 4 x 3"),
    ):
        import_labels(project, tmp_path, "coco", "ann")


def test_another_picture_in_the_place_is_not_replaced(tmp_path: Path) -> None:
    with filled(tmp_path / "one", 2, "coco") as project:
        export_labels(project, tmp_path / "out", "coco")
    with VisionProject.create(tmp_path / "two") as second:
        (second.folder / "a.png").write_bytes(b"mine")
        with pytest.raises(ArgumentError, match=r"a\.png' is there already, with another content"):
            import_labels(second, tmp_path / "out", "coco", "bob")
        assert (second.folder / "a.png").read_bytes() == b"mine"
        assert not (second.folder / "b c").exists()


def test_export_refuses_what_it_cannot_hold(tmp_path: Path) -> None:
    with filled(tmp_path / "one", 2, "imagefolder") as project:
        (tmp_path / "full").mkdir()
        (tmp_path / "full" / "notes").write_bytes(b"")
        for format_name, target, words in (
            ("paint", "out", "format 'paint': want one of coco, csv"),
            ("coco", "out", "kind class of a picture: COCO holds Box, Polygon, Mask"),
            ("csv", "full", "is there and not empty: want a new folder"),
        ):
            with pytest.raises(ArgumentError, match=words):
                export_labels(project, tmp_path / target, format_name)
        project.set_labels("a.png", (), "ann")
        with pytest.raises(ArgumentError, match="has 0 classes: ImageFolder holds one a picture"):
            export_labels(project, tmp_path / "out", "imagefolder")
        assert sorted(each.name for each in tmp_path.iterdir()) == ["full", "one"]


def test_the_commands_import_and_export(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with filled(tmp_path / "one", 3, "yolo") as project:
        count = sum(len(each.labels or ()) for each in project.labellings().values())
    assert main(["vision", "export", str(tmp_path / "one"), str(tmp_path / "out"), "--format", "yolo"]) == 0
    assert capsys.readouterr().out == f"6 pictures, {count} labels, 5 classes: {tmp_path / 'out'}\n"
    words = [str(tmp_path / "two"), str(tmp_path / "out"), "--format", "yolo", "--author", "bob"]
    assert main(["vision", "import", *words]) == 0
    assert capsys.readouterr().out == f"6 pictures, 6 of them copied, {count} labels\n"
    assert main(["vision", "import", *words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["copied"] == 0
    assert main(["vision", "export", str(tmp_path / "two"), str(tmp_path / "out"), "--format", "yolo"]) == 2
    assert "is there and not empty" in capsys.readouterr().err
    assert (
        main(
            ["vision", "export", str(tmp_path / "two"), str(tmp_path / "out2"), "--format", "csv", "--boxes", "--json"]
        )
        == 0
    )
    assert json.loads(capsys.readouterr().out)["pictures"] == 6


def test_labels_that_somebody_gave_are_replaced_only_if_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("cat/0.png", "cat/1.png", "dog/2.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        Image.new("RGB", (5, 4), (int(name[-5]) * 9, 0, 0)).save(tmp_path / name)
    words = ["vision", "import", str(tmp_path), str(tmp_path), "--format", "imagefolder"]
    assert main(words) == 0
    with VisionProject.open(tmp_path) as project:
        project.set_labels("cat/1.png", (Label(class_name="dog"),), "ann")
        project.set_labels("dog/2.png", (), "ann")
    Image.new("RGB", (5, 4), "white").save(tmp_path / "dog/3.png")
    capsys.readouterr()
    assert main(words) == 2
    told = capsys.readouterr().err
    assert "2 of 4 pictures have other labels in the project already, such as 'cat/1.png' by 'ann'" in told
    assert "--labelled keep" in told

    def classes() -> dict[str, list[str]]:
        with VisionProject.open(tmp_path) as project:
            return {path: [of.class_name for of in each.labels or ()] for path, each in project.labellings().items()}

    corrected = {"cat/0.png": ["cat"], "cat/1.png": ["dog"], "dog/2.png": []}
    assert classes() == corrected
    assert main([*words, "--labelled", "keep"]) == 0
    assert classes() == {**corrected, "dog/3.png": ["dog"]}
    assert main([*words, "--labelled", "replace"]) == 0
    assert classes() == {"cat/0.png": ["cat"], "cat/1.png": ["cat"], "dog/2.png": ["dog"], "dog/3.png": ["dog"]}


def test_pictures_without_labels_beside_the_others_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "set" / "images").mkdir(parents=True)
    for name in ("a", "b", "c"):
        Image.new("RGB", (5, 4), (name == "a" and "red") or "blue").save(tmp_path / "set" / "images" / f"{name}.png")
    written("labels.csv", "path,class\na.png,cat\n")(tmp_path / "set")
    assert main(["vision", "import", str(tmp_path / "project"), str(tmp_path / "set"), "--format", "csv"]) == 0
    assert capsys.readouterr().out == "1 picture, 1 of them copied, 1 label; 2 other pictures without labels left out\n"


def test_a_label_that_is_given_twice_counts_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b"):
        Image.new("RGB", (9, 8), "red").save(tmp_path / f"{name}.png")
    box = "cat,1,2,3,4\n"
    written("labels.csv", f"path,class,left,top,width,height\na.png,{box}a.png,{box}a.png,cat,1,2,3,5\nb.png,{box}")(
        tmp_path
    )
    words = ["vision", "import", str(tmp_path / "project"), str(tmp_path / "labels.csv"), "--format", "csv"]
    for _ in range(2):  # the second time finds the same labels
        assert main(words) == 0
        told = capsys.readouterr().out
        assert "3 labels; 1 label given again for a picture, equal in every field, left out\n" in told
    with VisionProject.open(tmp_path / "project") as project:
        assert [len(each.labels or ()) for each in project.labellings().values()] == [2, 1]


def test_two_pictures_that_are_one_frame_are_refused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        Image.new("RGB", (9, 8), "red").save(tmp_path / f"{name}.png")
    written("labels.csv", "path,class,video,frame\na.png,cat,v,1\nb.png,cat,v,1\n")(tmp_path)
    with VisionProject.create(tmp_path / "project") as project:
        with pytest.raises(DataError, match=r"'a\.png' and 'b\.png' are both the frame 1 of the video 'v'"):
            import_labels(project, tmp_path, "csv", "ann")
        assert not project.images()


def test_videos_and_groups_are_stated_before_the_labels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A labelled frame without its video could be on the other side of a split."""

    def killed(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    Image.new("RGB", (9, 8), "red").save(tmp_path / "a.png")
    written("labels.csv", "path,class,video,frame,group\na.png,cat,v,1,g\n")(tmp_path)
    with VisionProject.create(tmp_path / "project") as project:
        monkeypatch.setattr(VisionProject, "set_many_labels", killed)
        with pytest.raises(KeyboardInterrupt):
            import_labels(project, tmp_path, "csv", "ann")
        [image] = project.images()
        assert (image.video, image.frame, image.group) == ("v", 1, "g")


def test_pictures_in_results_and_linked_folders_are_no_data(tmp_path: Path) -> None:
    source, elsewhere = tmp_path / "source", tmp_path / "elsewhere"
    for place in (source / "cat", elsewhere):
        place.mkdir(parents=True)
        Image.new("RGB", (9, 8), "red").save(place / "a.png")
    with VisionProject.create(source / "cat" / "inner") as inner:
        Image.new("RGB", (9, 8), "blue").save(inner.runs / "result.png")
    with VisionProject.create(source / "project") as project:
        done = import_labels(project, source, "imagefolder", "ann")
        assert (done.pictures, done.left_out) == (1, 0)
        (source / "dog").symlink_to(elsewhere)
        with pytest.raises(DataError, match="/dog' is a link that leads out of"):
            import_labels(project, source, "imagefolder", "ann")


def test_names_of_yolo_are_texts(tmp_path: Path) -> None:
    """YAML reads a plain no as false, and 010 as 8."""
    (tmp_path / "images").mkdir()
    Image.new("RGB", (5, 4)).save(tmp_path / "images" / "a.png")
    written("data.yaml", "names: [no, 010, ~]\nnc: 3\n")(tmp_path)
    written("labels/a.txt", "1 0.5 0.5 0.5 1\n")(tmp_path)
    with VisionProject.create(tmp_path / "project") as project:
        import_labels(project, tmp_path, "yolo", "ann")
        assert project.classes() == ("no", "010", "~")


def test_a_copy_that_failed_leaves_no_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of a picture, after a full disk, would be another picture in the place of the next import's."""

    def full(read: Any, written: Any) -> None:
        written.write(read.read(10))
        raise OSError(28, "No space left on device")

    with filled(tmp_path / "one", 2, "coco") as project:
        export_labels(project, tmp_path / "out", "coco")
    with VisionProject.create(tmp_path / "two") as second:
        with monkeypatch.context() as patch:
            patch.setattr("shutil.copyfileobj", full)
            with pytest.raises(OSError, match="No space left"):
                import_labels(second, tmp_path / "out", "coco", "bob")
        assert import_labels(second, tmp_path / "out", "coco", "bob").copied


def test_folders_of_a_split_are_no_classes(tmp_path: Path) -> None:
    for name in ("train/cat/0.png", "val/cat/1.png", "val/dog/2.png"):
        (tmp_path / "set" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (5, 4), (int(name[-5]) * 9, 0, 0)).save(tmp_path / "set" / name)
    with VisionProject.create(tmp_path / "project") as project:
        with pytest.raises(DataError, match="parts of a split, with the classes in them: train, val"):
            import_labels(project, tmp_path / "set", "imagefolder", "ann")
        import_labels(project, tmp_path / "set" / "val", "imagefolder", "ann")
        assert project.classes() == ("cat", "dog")


def test_a_name_that_is_not_utf_8_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "set" / "cat").mkdir(parents=True)
    Image.new("RGB", (5, 4)).save(os.fsencode(tmp_path / "set" / "cat") + b"/\xff.png")
    with (
        VisionProject.create(tmp_path / "project") as project,
        pytest.raises(DataError, match="want a name in UTF-8; rename the file"),
    ):
        import_labels(project, tmp_path / "set", "imagefolder", "ann")
