"""Checkpoint files load correctly or raise an error that names the file, for damaged and foreign files too."""

import errno
import hashlib
import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from tests.support.checkpoint_trees import NAME, loaded, same, saved

from multiring._frontend.checkpoint import array_file, folder
from multiring._frontend.checkpoint.files import find
from multiring._frontend.checkpoint.folder import SaveAttempt, require_ours
from multiring.errors import ArgumentError

VALUE = {
    "weights": {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(3, np.int64)},
    "steps": [1, 2.5, None, True, "text"],
    "pair": (1, (2, float("inf"))),
    "by number": {0: np.zeros(2), (1, 2): "x"},
}


def test_values_come_back(tmp_path: Path) -> None:
    assert same(loaded(saved(tmp_path / "c", VALUE)), VALUE)


def replaced(data: bytes, chosen: random.Random) -> bytes:
    """Return `data` with some bytes changed, dropped or duplicated."""
    changed = bytearray(data)
    for _ in range(chosen.randint(1, 3)):
        at = chosen.randrange(len(changed))
        kind = chosen.randrange(4)
        if kind == 0:
            changed[at] = chosen.randrange(256)
        elif kind == 1:
            changed[at] = chosen.choice(b'0123456789[]{}",:$-ntaf')
        elif kind == 2:
            del changed[at : at + chosen.randint(1, 9)]
        else:
            changed[at:at] = changed[at : at + chosen.randint(1, 9)]
    return bytes(changed)


def test_damaged_files_are_told(tmp_path: Path) -> None:
    root, told = saved(tmp_path / "c", VALUE), 0
    chosen = random.Random(5)  # noqa: S311 -- no secret
    files = sorted(each for each in root.rglob("*") if each.is_file() and each.name != folder.MARK)
    assert [file.suffix for file in files].count(".json") == 2
    for turn in range(500):
        file = files[turn % len(files)]
        good = file.read_bytes()
        file.write_bytes(replaced(good, chosen))
        try:
            assert same(loaded(root), VALUE)  # an added or missing blank is no damage
        except ArgumentError as error:
            assert "checkpoint" in str(error)  # noqa: PT017 -- others pass
            told += 1
        finally:
            file.write_bytes(good)
    assert told > 400
    assert same(loaded(root), VALUE)


@pytest.mark.parametrize(
    ("name", "change", "text"),
    [
        ("", {"format": 3}, "is not of format 1 or 2; was it saved by a newer version"),
        ("", {"format": True}, "is not of format"),
        ("", {"saver": "another"}, "does not belong to a checkpoint: it lacks 'multiring checkpoint'"),
        ("", {"token": None}, "is damaged: it lacks a token, or the number of ranks"),
        ("", {"token": "../../../etc"}, "is damaged: it lacks a token"),
        ("", {"token": "0" * 16}, "is damaged: its data folder data-0000000000000000 is missing"),
        ("", {"ranks": 0}, "is damaged: it lacks a token, or the number of ranks"),
        (NAME, {"token": "another"}, "all belongs to another save; want files of one save"),
        (NAME, {"tree": None}, r"all\.json is damaged: it has no tree"),
        (NAME, {"tree": {"value": 1}}, "damaged: it has arrays that belong to none of its values"),
        (
            NAME,
            {"arrays": None, "tree": {"value": {"$array": ["all.x", "int8", [1]]}}},
            "the checkpoint's array 'all.x' is missing",
        ),
        (
            NAME,
            {"arrays": None, "tree": {"value": {"$new": 1}}},
            r"the checkpoint has '\$new', which this version does",
        ),
        (NAME, {"arrays": None, "tree": {"value": {"$items": 1}}}, r"the checkpoint is damaged: \$items of 1"),
        (NAME, {"arrays": None, "tree": {"value": {"$scalar": ["O", ""]}}}, "arrays of type 'O' cannot be stored"),
    ],
)
def test_what_a_checkpoint_may_not_say(name: str, change: dict[str, Any], text: str, tmp_path: Path) -> None:
    root = saved(tmp_path / "c", VALUE)
    (file,) = root.rglob(f"{name}.json" if name else "manifest.json")
    told = json.loads(file.read_text()) | change
    if name:
        told["digest"] = hashlib.sha256(json.dumps(told["tree"]).encode()).hexdigest()
    file.write_text(json.dumps(told))
    with pytest.raises(ArgumentError, match=text):
        loaded(root)


def test_arrays_that_were_cut_short(tmp_path: Path) -> None:
    root = saved(tmp_path / "c", VALUE)
    (file,) = root.rglob("all.safetensors")
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(ArgumentError, match=r"all\.safetensors is damaged"):
        loaded(root)
    file.unlink()
    with pytest.raises(ArgumentError, match="all cannot be read"):
        loaded(root)


def test_a_file_in_a_checkpoints_place(tmp_path: Path) -> None:
    (tmp_path / "c").write_bytes(b"")
    with pytest.raises(ArgumentError, match="is a file, and the folder of a checkpoint would replace it"):
        require_ours(tmp_path / "c")
    with pytest.raises(ArgumentError, match="is a file, and a checkpoint of multiring is a folder"):
        find(tmp_path / "c")


CURRENT = {"format": folder.FORMAT, "saver": folder.SAVER, "token": "0123456789abcdef", "ranks": 1}


@pytest.mark.parametrize("manifest", [None, "{}", "{", json.dumps(CURRENT)])
def test_only_a_checkpoint_of_before_may_be_removed_as_one(tmp_path: Path, manifest: str | None) -> None:
    """What is taken for one is removed after the next save."""
    if manifest is not None:
        (tmp_path / "manifest.json").write_text(manifest, encoding="utf-8")
    assert not folder._is_all_of_before(tmp_path)
    (tmp_path / "manifest.json").write_text(json.dumps({**CURRENT, "format": folder.BEFORE}), encoding="utf-8")
    assert folder._is_all_of_before(tmp_path)


def test_a_disk_that_does_not_keep_a_folder_s_entries_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = errno.EINVAL  # of a file system that has nothing to wait for

    def refused(_: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("os.fsync", refused)
    folder.sync(tmp_path)
    number = errno.EIO
    with pytest.raises(OSError, match="Input/output error"):
        folder.sync(tmp_path)


def files_in(path: Path) -> dict[str, bytes]:
    return {str(each.relative_to(path)): each.read_bytes() for each in sorted(path.rglob("*")) if each.is_file()}


STRANGERS = {
    "notes": {"notes.txt": "a week of it"},
    "hidden": {".gitkeep": ""},
    "checkpoints below": {
        "epoch0/manifest.json": '{"format": 1, "token": "0123456789abcdef", "ranks": 1, "parts": []}'
    },
    "an extension's manifest": {"manifest.json": '{"manifest_version": 3, "name": "x"}', "x.js": ""},
    "a manifest that is empty": {"manifest.json": ""},
    "a newer one": {"manifest.json": '{"format": 3, "token": "0123456789abcdef", "ranks": 1, "parts": []}'},
    "a name like ours": {"data-0123456789abcdef": "a file", "mine": "x"},
    "shared.json of others": {"shared.json": "{}"},
}


@pytest.mark.parametrize("what", STRANGERS)
def test_a_folder_of_others_is_refused_and_left_alone(what: str, tmp_path: Path) -> None:
    for name, text in STRANGERS[what].items():
        (tmp_path / "c" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "c" / name).write_text(text)
    before = files_in(tmp_path)
    with pytest.raises(ArgumentError, match="want another path, an empty folder, or a checkpoint of multiring"):
        saved(tmp_path / "c", 1)
    assert files_in(tmp_path) == before


def test_what_others_put_into_a_checkpoint_stays(tmp_path: Path) -> None:
    root = saved(tmp_path / "c", 1)
    (data,) = root.glob("data-*")
    kept = [root / "metrics.csv", root / "epoch0" / "manifest.json", data / "notes.txt", root / "data-" / "x"]
    kept.append(root / "data-00000000000000aa" / "rank-00000.json")  # without the mark file of its save
    for each in kept:
        each.parent.mkdir(exist_ok=True)
        each.write_text("a week of it")
    for value in range(3):
        assert loaded(saved(root, value)) == value
    assert [each.read_text() for each in kept] == ["a week of it"] * len(kept)


def test_a_link_to_a_folder_is_followed(tmp_path: Path) -> None:
    saved(tmp_path / "real", 1)
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "gone").symlink_to("nothing")
    saved(tmp_path / "link", 2)
    assert loaded(tmp_path / "real") == 2
    assert (tmp_path / "link").is_symlink()
    with pytest.raises(ArgumentError, match="is a link to nothing, which does not exist"):
        saved(tmp_path / "gone", 1)


def unfinished(path: Path, token: str) -> SaveAttempt:
    attempt = SaveAttempt(path, token)
    attempt.begin()
    (folder.data_folder(path, token) / "shared.json").write_text("half")
    return attempt


def test_what_a_killed_save_left_goes_and_what_another_writes_stays(tmp_path: Path) -> None:
    root = tmp_path / "c"
    alive = unfinished(root, "a" * 16)
    lost = unfinished(root, "b" * 16)
    lost._mark.close()  # type: ignore[union-attr]
    elsewhere = unfinished(root, "c" * 16)
    elsewhere._mark.close()  # type: ignore[union-attr]
    mark = folder.data_folder(root, "c" * 16) / folder.MARK
    mark.write_text(json.dumps(json.loads(mark.read_text()) | {"host": "another"}))
    (root / f"manifest-{'d' * 16}.new").write_text("{")
    saved(root, 1)
    assert sorted(each.name[:6] for each in root.iterdir()) == sorted(["manife", "data-a", "data-c", *data_of(root)])
    with pytest.raises(RuntimeError, match="no more"), alive:
        raise RuntimeError("no more")
    assert not folder.data_folder(root, "a" * 16).exists()
    assert loaded(root) == 1


def data_of(root: Path) -> list[str]:
    return [find(root)[0].name[:6]]


# ---- checkpoints of multiring 0.2 ----


def saved_by_02(path: Path, token: str = "0123456789abcdef") -> Path:  # noqa: S107 -- of one save
    path.mkdir(parents=True)
    arrays: dict[str, Any] = {"all.x": np.arange(3, dtype=np.float32), "all.y": np.arange(4)}
    tree = {"x": {"$array": "all.x"}, "y": {"$numpy": "all.y"}, "z": {"$tuple": [1, {"$float": "inf"}]}}
    save_file(arrays, path / "all.safetensors")
    (path / "all.json").write_text(json.dumps({"token": token, "arrays": True, "tree": {"value": tree}}))
    manifest = {"format": 1, "token": token, "ranks": 1, "parts": ["all"]}
    (path / "manifest.json").write_text(json.dumps(manifest))
    return path


BY_02 = {"x": np.arange(3, dtype=np.float32), "y": np.arange(4), "z": (1, float("inf"))}


@pytest.mark.parametrize("place", ["c", ".c.old", ".c.new"])
def test_a_checkpoint_of_02_is_loaded_and_replaced(place: str, tmp_path: Path) -> None:
    kept = saved_by_02(tmp_path / place)
    assert same(loaded(tmp_path / "c"), BY_02)
    for name in ("all.json", "all.safetensors"):  # the file names in multiring 0.2
        (kept / name).rename(kept / name.replace("all", "shared"))
    with pytest.raises(ArgumentError, match=r"all\.x is a set"):
        saved(tmp_path / "c", {"x": {1}})
    assert (kept / "shared.safetensors").exists()
    saved(tmp_path / "c", 2)
    assert loaded(tmp_path / "c") == 2
    assert [each.name for each in tmp_path.iterdir()] == ["c"]
    assert len(list((tmp_path / "c").iterdir())) == 2


def test_two_values_of_02_under_one_name_are_told(tmp_path: Path) -> None:
    root = saved_by_02(tmp_path / "c")
    told = json.loads((root / "all.json").read_text())
    told["tree"]["value"]["y"] = {"$array": "all.x"}
    (root / "all.json").write_text(json.dumps(told))
    with pytest.raises(ArgumentError, match=r"two values under the name 'all\.x', of which multiring 0.2 kept one"):
        loaded(root)


def test_what_lies_beside_and_is_not_of_02_stays(tmp_path: Path) -> None:
    for place in (".c.old", ".c.new"):
        saved_by_02(tmp_path / place)
        (tmp_path / place / "notes.txt").write_text("a week of it")
    before = files_in(tmp_path)
    saved(tmp_path / "c", 1)
    shutil.rmtree(tmp_path / "c")
    assert files_in(tmp_path) == before


def test_a_full_disk_is_named_with_the_file() -> None:
    with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
        array_file.write(Path("/dev/full"), [[b"some bytes"]])
