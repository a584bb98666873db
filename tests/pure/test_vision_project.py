"""A folder as a project: scans, classes, labels with their history, and several writers at a time."""

import io
import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from multiring.errors import ArgumentError, DataError, StateError
from multiring.vision import Box, ImageRecord, Label, Mask, Polygon, VisionProject, run_lengths_of
from multiring.vision.project import folder as folder_module
from multiring.vision.project.scanning import measured
from multiring.vision.project.schema import LabelStoreError, transaction

BOX = Box(class_name="cat", left=1, top=2, width=3, height=4)
DOG = Label(class_name="dog")


def draw(path: Path, seed: int, size: tuple[int, int] = (20, 10)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), np.uint8)
    Image.fromarray(pixels).save(path)


@pytest.fixture
def project(tmp_path: Path) -> VisionProject:
    folder = tmp_path / "project"
    for number, name in enumerate(("a.png", "b/c.png", "b/ü ñ.bmp")):
        draw(folder / name, number)
    made = VisionProject.create(folder)
    made.scan()
    for name in ("cat", "dog"):
        made.add_class(name)
    return made


def image(project: VisionProject, path: str) -> ImageRecord:
    return next(each for each in project.images() if each.path == path)


def test_a_scan_finds_what_is_there(project: VisionProject) -> None:
    assert [each.path for each in project.images()] == ["a.png", "b/c.png", "b/ü ñ.bmp"]
    found = image(project, "b/ü ñ.bmp")
    assert (found.width, found.height, found.format, found.mode, found.bits) == (20, 10, "BMP", "RGB", 8)
    assert found.is_usable
    same = io.BytesIO()
    with Image.open(project.folder / "a.png") as opened:
        opened.save(same, "TIFF")
    (project.folder / "copy.tif").write_bytes(same.getvalue())
    (project.folder / "bad.jpg").write_bytes(b"\xff\xd8\xff")
    (project.folder / ".hidden.png").write_bytes(b"")
    (project.folder / "notes.txt").write_bytes(b"")
    draw(project.runs / "x.png", 9)
    result = project.scan()
    assert (result.added, result.unreadable) == (("bad.jpg", "copy.tif"), ("bad.jpg",))
    assert image(project, "copy.tif").pixels_digest == image(project, "a.png").pixels_digest
    assert image(project, "copy.tif").digest != image(project, "a.png").digest
    assert "bad.jpg' is no picture" in image(project, "bad.jpg").problem
    again = project.scan()
    assert (again.added, again.changed, again.moved, again.missing) == ((), (), (), ())
    assert again.unreadable == ("bad.jpg",)


def test_changed_moved_missing_and_returned_files(project: VisionProject) -> None:
    project.set_labels("a.png", (BOX,), "ann")
    (project.folder / "a.png").rename(project.folder / "z.png")
    draw(project.folder / "b/c.png", 7, (30, 30))
    kept = (project.folder / "b/ü ñ.bmp").read_bytes()
    (project.folder / "b/ü ñ.bmp").unlink()
    result = project.scan()
    assert result.moved == (("a.png", "z.png"),)
    assert (result.added, result.changed, result.missing) == ((), ("b/c.png",), ("b/ü ñ.bmp",))
    found = project.labelling("z.png")
    assert found is not None
    assert found.labels == (BOX,)
    assert image(project, "b/c.png").width == 30
    assert not image(project, "b/ü ñ.bmp").is_usable
    (project.folder / "b/ü ñ.bmp").write_bytes(kept)
    assert project.scan().missing == ()
    assert image(project, "b/ü ñ.bmp").is_usable


def test_a_move_that_is_not_certain_keeps_the_labels_where_they_were(project: VisionProject) -> None:
    project.set_labels("a.png", (BOX,), "ann")
    data = (project.folder / "a.png").read_bytes()
    (project.folder / "a.png").unlink()
    for name in ("x.png", "y.png"):
        (project.folder / name).write_bytes(data)
    result = project.scan()
    assert (result.added, result.moved, result.missing) == (("x.png", "y.png"), (), ("a.png",))
    found = project.labelling("a.png")
    assert found is not None
    assert found.labels == (BOX,)


def test_links_and_odd_names(project: VisionProject, tmp_path: Path) -> None:
    draw(tmp_path / "outside.png", 5)
    for name, target in (("in.png", "a.png"), ("out.png", "../outside.png"), ("none.png", "nothing.png")):
        (project.folder / name).symlink_to(target)
    (project.folder / "folder").symlink_to(tmp_path)
    draw(project.folder / "new\nline.png", 6)
    os.link(project.folder / "a.png", os.fsencode(project.folder) + b"/b\xff.png")
    result = project.scan()
    assert result.added == ("in.png",)
    assert {name: reason.partition(":")[0] for name, reason in result.refused} == {
        "folder": "the link leads out of the folder",
        "new\nline.png": "the name has control characters or is not UTF-8",
        r"b\udcff.png": "the name has control characters or is not UTF-8",
        "none.png": "the link leads to no file",
        "out.png": "the link leads out of the folder",
    }


def test_seen_and_empty_differs_from_not_labelled(project: VisionProject) -> None:
    assert project.labelling("a.png") is None
    project.set_labels("a.png", (), "ann")
    assert [each.labels for each in project.labellings().values()] == [()]
    project.set_labels("a.png", None, "ann")
    found = project.labelling("a.png")
    assert found is not None
    assert found.labels is None


def test_all_kinds_of_labels_are_kept(project: VisionProject) -> None:
    pixels = np.zeros((10, 20), bool)
    pixels[2:5, 3:9] = True
    labels = (
        BOX,
        DOG,
        Polygon(class_name="cat", outlines=(((0, 0), (5, 0), (5.5, 4)),), track="7"),
        Mask(class_name="dog", pixels=run_lengths_of(pixels), is_crowd=True),
    )
    number = project.set_labels("b/c.png", labels, "ann")
    found = project.labelling("b/c.png")
    assert found is not None
    assert (found.labels, found.author, found.change) == (labels, "ann", number)
    assert found.time.endswith("+00:00")
    project.rename_class("cat", "Katze")
    found = project.labelling("b/c.png")
    assert found is not None
    assert found.labels is not None
    assert [each.class_name for each in found.labels] == ["Katze", "dog", "Katze", "dog"]
    assert project.classes() == ("Katze", "dog")


def test_undo_takes_back_the_authors_last_change(project: VisionProject) -> None:
    def now(path: str) -> object:
        found = project.labelling(path)
        return None if found is None else found.labels

    project.set_labels("a.png", (BOX,), "ann")
    project.set_many_labels({"a.png": (DOG,), "b/c.png": ()}, "ann")
    project.set_labels("b/ü ñ.bmp", (DOG,), "bob")
    assert project.undo("ann") == ("a.png", "b/c.png")
    assert (now("a.png"), now("b/c.png"), now("b/ü ñ.bmp")) == ((BOX,), None, (DOG,))
    assert project.undo("ann") == ("a.png",)
    assert now("a.png") is None
    with pytest.raises(StateError, match="'ann' has made no change that can be undone"):
        project.undo("ann")
    project.set_labels("b/ü ñ.bmp", (), "ann")
    with pytest.raises(StateError, match=r"'bob' cannot undo the last change: 'ann' changed 'b/ü ñ.bmp' later"):
        project.undo("bob")
    assert project.undo("ann") == ("b/ü ñ.bmp",)
    assert now("b/ü ñ.bmp") == (DOG,)
    assert project.undo("bob") == ("b/ü ñ.bmp",)
    assert now("b/ü ñ.bmp") is None
    assert [each.labels for each in project.history("b/ü ñ.bmp")] == [(DOG,), (), (DOG,), None]


def test_random_changes_and_undos_are_those_of_a_stack(project: VisionProject) -> None:
    random = np.random.default_rng(3)
    paths = [each.path for each in project.images()]
    states: list[dict[str, object]] = [{}]
    for step in range(60):
        if len(states) > 1 and random.random() < 0.4:
            project.undo("ann")
            states.pop()
        else:
            chosen = [each for each in paths if random.random() < 0.5] or paths[:1]
            labels = (DOG, BOX)[: step % 3] if random.random() < 0.8 else None
            project.set_many_labels(dict.fromkeys(chosen, labels), "ann")
            states.append({**states[-1], **dict.fromkeys(chosen, labels)})
        found = {path: each.labels for path, each in project.labellings().items() if each.labels is not None}
        assert found == {path: each for path, each in states[-1].items() if each is not None}


def test_equal_labels_count_once(project: VisionProject) -> None:
    project.set_labels("a.png", (BOX, DOG, BOX, DOG), "ann")
    assert project.labellings()["a.png"].labels == (BOX, DOG)
    with sqlite3.connect(project.folder / "labels.sqlite") as database:  # as earlier releases stored them
        database.execute(
            "UPDATE labellings SET labels = json_array(json_extract(labels, '$[1]'), json_extract(labels, '$[1]'))"
        )
    assert project.labellings()["a.png"].labels == (DOG,)


def test_a_full_disk_changes_nothing_and_is_told(project: VisionProject) -> None:
    project.set_labels("a.png", (BOX,), "ann")
    pages = project._database.execute("PRAGMA page_count").fetchone()[0]
    project._database.execute(f"PRAGMA max_page_count = {pages}")  # as on a disk without room
    many = tuple(Box(class_name="cat", left=1, top=1, width=1, height=1 + number / 1000) for number in range(900))
    with pytest.raises(
        LabelStoreError, match=r"labels cannot be written: database or disk is full\. Nothing was changed"
    ):
        project.set_labels("a.png", many, "ann")
    assert project.labellings()["a.png"].labels == (BOX,)
    project._database.execute("PRAGMA max_page_count = 1000000")
    project.set_labels("a.png", (DOG,), "ann")  # the connection is as good as before
    assert project.labellings()["a.png"].labels == (DOG,)


def test_files_that_are_not_those_of_the_scan_are_told(project: VisionProject) -> None:
    paths = [each.path for each in project.images()]
    project.require_unchanged(paths)
    os.utime(project.folder / "a.png", ns=(0, 0))
    project.require_unchanged(paths)  # the same content
    data = (project.folder / "a.png").read_bytes()
    (project.folder / "a.png").write_bytes(data[:-1] + b"x")
    with pytest.raises(DataError, match=r"picture 'a.png' was changed since the last scan\. Put the files back"):
        project.require_unchanged(paths)
    (project.folder / "a.png").write_bytes(data + b"x")
    (project.folder / "b/c.png").unlink()
    with pytest.raises(DataError, match=r"'a\.png' was changed since the last scan, and 1 more is changed or gone"):
        project.require_unchanged(paths)
    with pytest.raises(DataError, match=r"'b/c\.png' is gone since the last scan"):
        project.require_unchanged(["b/c.png"])


def test_a_folder_that_cannot_be_read_is_told(project: VisionProject, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.scandir

    def scandir(path: Any) -> Any:
        if str(path).endswith("/b"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    assert project.scan().refused == (("b", "the folder cannot be read: Permission denied"),)


def test_a_stale_writer_is_told(project: VisionProject) -> None:
    first = project.set_labels("a.png", (BOX,), "ann", after=0)
    with pytest.raises(StateError, match=rf"was changed meanwhile \(change {first}, not 0\)"):
        project.set_labels("a.png", (DOG,), "bob", after=0)
    project.set_labels("a.png", (DOG,), "bob", after=first)


def test_wrong_labels_change_nothing(project: VisionProject) -> None:
    wide = Box(class_name="cat", left=15, top=0, width=6, height=4)
    (project.folder / "bad.jpg").write_bytes(b"")
    project.scan()
    for labels, error, words in (
        ({"a.png": (BOX,), "b/c.png": (wide,)}, DataError, r"'b/c.png': 'cat' is outside .* \(21, 4\)"),
        ({"a.png": (Label(class_name="dgo"),)}, ArgumentError, "'dgo' is not in the project.*did you mean 'dog'"),
        ({"a.png": (), "d.png": ()}, ArgumentError, "'d.png' is not in the project"),
        ({"bad.jpg": (DOG,)}, DataError, "'bad.jpg' cannot be read, so it cannot be labelled"),
    ):
        with pytest.raises(error, match=words):
            project.set_many_labels(labels, "ann")
    with pytest.raises(ArgumentError, match="author: want a name"):
        project.set_labels("a.png", (), " ")
    assert not project.labellings()
    project.set_labels("b/c.png", (wide,), "ann", outside_too=True)
    with pytest.raises(ArgumentError, match="give both, or neither"):
        project.set_frame("a.png", "v", None)
    with pytest.raises(ArgumentError, match="class 'dog' is there already"):
        project.rename_class("cat", "dog")
    with pytest.raises(ArgumentError, match="class 'bird' is not in the project"):
        project.rename_class("bird", "fish")
    for name in ("", " ", "a\nb"):
        with pytest.raises(ArgumentError, match="want a name with visible characters"):
            project.add_class(name)


def test_two_who_rename_at_once_do_not_lose_a_class(project: VisionProject, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process renames after the look for the names; the second change is refused, not passed over."""
    beside = VisionProject.open(project.folder)

    def late(_: Any) -> Any:
        monkeypatch.undo()
        beside.rename_class("cat", "lynx")
        return transaction(project._database)

    monkeypatch.setattr(folder_module, "transaction", late)
    with beside, pytest.raises(ArgumentError, match="class 'cat' is not in the project"):
        project.rename_class("cat", "Katze")
    assert "lynx" in project.classes()


def test_groups_and_frames(project: VisionProject) -> None:
    project.set_group("a.png", "patient 1")
    project.set_frame("b/c.png", "film", 12)
    assert image(project, "a.png").group == "patient 1"
    assert (image(project, "b/c.png").video, image(project, "b/c.png").frame) == ("film", 12)
    project.set_group("a.png", None)
    project.set_frame("b/c.png", None, None)
    assert [(each.group, each.video, each.frame) for each in project.images()] == [(None, None, None)] * 3


def test_folders_that_are_no_project(project: VisionProject, tmp_path: Path) -> None:
    with pytest.raises(StateError, match=r"labels\.sqlite' is there already"):
        VisionProject.create(project.folder)
    with pytest.raises(DataError, match=r"is no vision project: .*`multiring vision label"):
        VisionProject.open(tmp_path)
    assert VisionProject.is_project(project.folder)
    assert not VisionProject.is_project(tmp_path)
    for name, data in (("text", b"some text, which is no database" * 99), ("other", b"")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "labels.sqlite").write_bytes(data)
        with pytest.raises(DataError, match=r"cannot be read as a database|is not a file of a vision project"):
            VisionProject.open(tmp_path / name)
        assert (tmp_path / name / "labels.sqlite").read_bytes() == data
    with sqlite3.connect(project.folder / "labels.sqlite") as database:
        database.execute("PRAGMA user_version = 99")
    database.close()
    with pytest.raises(DataError, match="has version 99 of the tables: this multiring reads version 1"):
        VisionProject.open(project.folder)


WRITER = """
import sys
from multiring.vision import Label, VisionProject
with VisionProject.open(sys.argv[1]) as project:
    for number in range(40):
        project.set_labels("a.png", (Label(class_name="cat", track=f"{sys.argv[2]} {number}"),), sys.argv[2])
"""


def test_several_processes_write_at_a_time(project: VisionProject) -> None:
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(project.folder), name]) for name in ("ann", "bob")]
    assert [each.wait(240) for each in writers] == [0, 0]
    found = project.history("a.png")
    assert len(found) == 80
    for name in ("ann", "bob"):
        tracks = [each.labels[0].track for each in found if each.author == name and each.labels]
        assert tracks == [f"{name} {number}" for number in range(40)]


def test_an_interrupted_scan_goes_on(project: VisionProject, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(7):
        draw(project.folder / f"new{number}.png", 20 + number)
    (project.folder / "a.png").rename(project.folder / "moved.png")
    project.set_labels("a.png", (BOX,), "ann")

    def interrupted(*arguments: Any) -> Iterator[Any]:
        yield from islice(measured(*arguments), 5)
        raise KeyboardInterrupt

    monkeypatch.setattr(folder_module, "_BATCH", 2)
    monkeypatch.setattr(folder_module, "measured", interrupted)
    with pytest.raises(KeyboardInterrupt):
        project.scan()
    kept = [each.path for each in project.images()]
    assert 5 <= len(kept) < 10
    assert "a.png" in kept
    monkeypatch.setattr(folder_module, "measured", measured)
    result = project.scan()
    assert result.moved == (("a.png", "moved.png"),)
    assert set(result.added).isdisjoint(kept)
    assert len(project.images()) == 10
    assert project.scan().added == ()


@pytest.mark.parametrize("names", [("a.png", "b/c.png"), ("a.png", "b/c.png", "b/ü ñ.bmp")])
def test_files_that_exchange_their_names_keep_their_labels(project: VisionProject, names: tuple[str, ...]) -> None:
    digests = {name: image(project, name).digest for name in names}
    for number, name in enumerate(names):
        project.set_labels(name, (Box(class_name="cat", left=number, top=0, width=1, height=1),), "ann")
    for name in names:
        (project.folder / name).rename(project.folder / f"{name}.kept")
    turned = dict(zip(names, (*names[1:], names[0]), strict=True))
    for former, path in turned.items():
        (project.folder / f"{former}.kept").rename(project.folder / path)
    result = project.scan()
    assert set(result.moved) == set(turned.items())
    assert result.changed == result.added == result.missing == ()
    for number, former in enumerate(names):
        path = turned[former]
        assert image(project, path).digest == digests[former]
        found = project.labelling(path)
        assert found is not None
        assert found.labels == (Box(class_name="cat", left=number, top=0, width=1, height=1),)


def test_a_file_that_took_the_place_of_another_is_told_as_changed(project: VisionProject) -> None:
    project.set_labels("a.png", (BOX,), "ann")
    project.set_labels("b/c.png", (DOG,), "ann")
    (project.folder / "b/c.png").replace(project.folder / "a.png")
    result = project.scan()
    assert (result.changed, result.missing, result.moved) == (("a.png",), ("b/c.png",), ())
    # A chain: what was overwritten stays where it is, and what moved on moves.
    (project.folder / "b/ü ñ.bmp").rename(project.folder / "b/d.bmp")
    draw(project.folder / "b/ü ñ.bmp", 77)
    result = project.scan()
    assert (result.moved, result.added) == ((("b/ü ñ.bmp", "b/d.bmp"),), ("b/ü ñ.bmp",))


def test_summaries_tell_the_state_of_each_picture(project: VisionProject) -> None:
    first = project.set_labels("a.png", (BOX, DOG), "ann")
    second = project.set_labels("b/c.png", (), "ben")
    project.set_frame("b/c.png", "film", 3)
    found = {each.path: each for each in project.summaries()}
    assert [(each.labels, each.author, each.change) for each in found.values()] == [
        (2, "ann", first),
        (0, "ben", second),
        (None, "", 0),
    ]
    assert (found["b/c.png"].video, found["b/c.png"].frame) == ("film", 3)
    assert found["a.png"].digest == image(project, "a.png").digest == project.image("a.png").digest
    assert [each.path for each in project.summaries(first)] == ["b/c.png"]
    third = project.set_labels("a.png", None, "ann")
    assert [(each.path, each.labels, each.change) for each in project.summaries(second)] == [("a.png", None, third)]


def test_labels_of_another_file_are_refused(project: VisionProject) -> None:
    seen = image(project, "a.png").digest
    project.set_labels("a.png", (BOX,), "ann", digest=seen)
    draw(project.folder / "a.png", 50)
    project.scan()
    with pytest.raises(StateError, match="another file now"):
        project.set_labels("a.png", (), "ann", digest=seen)
    labels = {"a.png": (), "b/c.png": ()}
    with pytest.raises(StateError, match=r"'b/c.png' was changed meanwhile \(change 0, not 7\)"):
        project.set_many_labels(labels, "ann", after={"b/c.png": 7})
    assert project.labelling("b/c.png") is None


def test_undo_of_a_change_by_its_number(project: VisionProject) -> None:
    one = project.set_labels("a.png", (BOX,), "ann")
    other = project.set_labels("b/c.png", (DOG,), "ann")  # in another window
    assert project.undo("ann", one) == ("a.png",)
    for number in (one, 99):
        with pytest.raises(StateError, match=f"'ann' has made no change {number} that can be undone"):
            project.undo("ann", number)
    with pytest.raises(StateError, match="'ben' has made no change"):
        project.undo("ben", other)
    project.set_labels("b/c.png", (), "ann")
    with pytest.raises(StateError, match=r"changed .b/c\.png. later"):
        project.undo("ann", other)
