"""What a checkpoint's files say is loaded, or told by the file's name; whatever befell them."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from multiring.errors import ArgumentError
from multiring.frontend.checkpoint.files import FORMAT, find, finish, read_part, require_folder, write_part
from multiring.frontend.checkpoint.tree import NumpyArrays, flattened, unflattened

TOKEN = "0123456789abcdef"  # noqa: S105 -- of one save
VALUE = {
    "weights": {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(3, np.int64)},
    "steps": [1, 2.5, None, True, "text"],
    "pair": (1, (2, float("inf"))),
    "by number": {0: np.zeros(2), (1, 2): "x"},
}


def saved(path: Path) -> Path:
    """Return the folder of a checkpoint of VALUE."""
    stored: dict[str, Any] = {}
    tree = flattened(VALUE, "all", NumpyArrays(), stored)
    write_part(path, "all", TOKEN, (tree, stored))
    finish(path, TOKEN, 1, ["all"])
    return path


def loaded(path: Path) -> Any:
    place, manifest = find(path)
    tree, stored = read_part(place, "all", manifest["token"])
    return unflattened(tree, NumpyArrays(), stored)


def test_values_come_back(tmp_path: Path) -> None:
    found = loaded(saved(tmp_path / "c"))
    assert found["steps"] == VALUE["steps"]
    assert found["pair"] == VALUE["pair"]
    assert found["by number"][1, 2] == "x"
    assert np.array_equal(found["weights"]["a"], VALUE["weights"]["a"])  # type: ignore[index]


def replaced(data: bytes, chosen: random.Random) -> bytes:
    """Return the bytes with some of them others, left out or there twice."""
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
    root, told = saved(tmp_path / "c"), 0
    chosen = random.Random(5)  # noqa: S311 -- no secret
    files = sorted(root.iterdir())
    assert [file.suffix for file in files].count(".json") == 2
    for turn in range(1500):
        file = files[turn % len(files)]
        good = file.read_bytes()
        file.write_bytes(replaced(good, chosen))
        try:
            loaded(root)
        except ArgumentError as error:
            assert "checkpoint" in str(error)  # noqa: PT017 -- others pass
            told += 1
        finally:
            file.write_bytes(good)
    assert told > 700  # a number may well be another one
    loaded(root)


@pytest.mark.parametrize(
    ("name", "change", "text"),
    [
        ("", {"format": FORMAT + 1}, "is not of format .*; was it saved by a newer version"),
        ("", {"token": None}, "is damaged: it lacks a token, or the number of ranks"),
        ("all", {"token": "another"}, "all belongs to another one; want files of one save"),
        ("all", {"tree": None}, r"all\.json is damaged: it has no tree"),
        (
            "all",
            {"arrays": None, "tree": {"$array": "all.x"}},
            "the checkpoint's array 'all.x' is named, and not there",
        ),
        ("all", {"tree": {"$new": 1}}, r"the checkpoint has '\$new', which this version does not know"),
        ("all", {"tree": {"$items": 1}}, r"the checkpoint is damaged: \$items of 1"),
    ],
)
def test_what_a_checkpoint_may_not_say(name: str, change: dict[str, Any], text: str, tmp_path: Path) -> None:
    root = saved(tmp_path / "c")
    (manifest,) = (each for each in root.glob("*.json") if each.name != "all.json")
    file = root / "all.json" if name else manifest
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ArgumentError, match=text):
        loaded(root)


def test_arrays_that_were_cut_short(tmp_path: Path) -> None:
    root = saved(tmp_path / "c")
    file = root / "all.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(ArgumentError, match=r"all\.safetensors is damaged"):
        loaded(root)
    file.unlink()
    with pytest.raises(ArgumentError, match="all cannot be read"):
        loaded(root)


def test_a_file_in_a_checkpoints_place(tmp_path: Path) -> None:
    (tmp_path / "c").write_bytes(b"")
    with pytest.raises(ArgumentError, match="is a file, which a checkpoint, a folder, would replace"):
        require_folder(tmp_path / "c")
    with pytest.raises(ArgumentError, match="is a file, and a checkpoint of multiring's is a folder"):
        find(tmp_path / "c")
