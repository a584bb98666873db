"""Which run is in production, as a person has set it: the file runs/production.json of a project."""

import json
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from multiring._replacing import replace_file
from multiring.errors import DataError
from multiring.vision.models.description import read_description

_FILE = "production.json"
_KEY = "multiring_production"


def production_runs(folder: Path | str) -> dict[str, str]:
    """Return the name of the run in production for each kind of model that has one.

    Raises:
        DataError: the file is damaged.
    """
    return {kind: str(each["run"]) for kind, each in _read(Path(folder) / "runs" / _FILE).items()}


def set_production(folder: Path | str, run: str) -> str:
    """State that a run is in production, in place of another one of its kind, and return the kind.

    Raises:
        DataError: the run has no trained model, or the file is damaged.
    """
    folder = Path(folder)
    described = read_description(folder / "runs" / run)
    path = folder / "runs" / _FILE
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    told = {**_read(path), described.kind: {"run": run, "when": now, "weights": described.digests.get("weights", "")}}
    text = json.dumps({_KEY: 1, "runs": told}, ensure_ascii=False, indent=1) + "\n"
    replace_file(path, text.encode(), is_ours=lambda found: f'"{_KEY}"'.encode() in found[:100], what="production.json")
    return described.kind


def _read(path: Path) -> dict[str, dict[str, Any]]:
    if not path.exists():
        return {}
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        return {str(kind): {"run": each["run"], **each} for kind, each in told["runs"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{str(path)!r} is damaged: {type(error).__name__}: {error}; remove it") from error
