"""Folders of generated data. A file in the folder marks them, so that nobody's own data are overwritten."""

import json
from pathlib import Path
from typing import Any

from multiring.errors import ArgumentError

GENERATED = "generated.json"  # the parameters of the generated data


def claim(folder: Path, **told: Any) -> None:
    """Make a folder for generated data, or reuse a folder that has generated data.

    Args:
        folder: the folder for the data.
        told: the parameters of the data, for readers of the folder.

    Raises:
        ArgumentError: the folder has other files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()) and not (folder / GENERATED).is_file():
        raise ArgumentError(
            f"{folder} has files, and no {GENERATED}, which this program writes beside its data; nothing was "
            "written. Want an empty folder, or one that does not exist"
        )
    (folder / GENERATED).write_text(json.dumps(told, indent=1), encoding="utf-8")
