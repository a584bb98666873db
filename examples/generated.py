"""Folders of generated data: known by a file in them, so that nobody's own data are written over."""

import json
from pathlib import Path
from typing import Any

from multiring.errors import ArgumentError

GENERATED = "generated.json"  # what a folder's data were generated with


def claim(folder: Path, **told: Any) -> None:
    """Make a folder for generated data, or take one that has some already.

    Args:
        folder: where the data are to be.
        told: what they are generated with, for a reader of the folder.

    Raises:
        ArgumentError: the folder has other files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()) and not (folder / GENERATED).is_file():
        raise ArgumentError(
            f"{folder} has files, and no {GENERATED}, which this program leaves in what it generates; nothing was "
            "written. Want an empty folder, or one that is not there yet"
        )
    (folder / GENERATED).write_text(json.dumps(told, indent=1), encoding="utf-8")
