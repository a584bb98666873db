"""Which run is in production, as a person has set it: the file runs/production.json of a project."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from multiring._file_locks import lock_within
from multiring._replacing import replace_file
from multiring.errors import ArgumentError, DataError
from multiring.vision.models.description import read_description

_FILE = "production.json"
_KEY = "multiring_production"
_PATIENCE_S = 10.0


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
        ArgumentError: another process is setting a run, and does not end.
    """
    folder = Path(folder)
    described = read_description(folder / "runs" / run)
    path = folder / "runs" / _FILE
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    new = {described.kind: {"run": run, "when": now, "weights": described.digests.get("weights", "")}}
    with _alone(path.parent):  # a person may set another kind at this moment
        text = json.dumps({_KEY: 1, "runs": {**_read(path), **new}}, ensure_ascii=False, indent=1) + "\n"
        is_ours = f'"{_KEY}"'.encode()
        replace_file(path, text.encode(), is_ours=lambda found: is_ours in found[:100], what="production.json")
    return described.kind


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keep other processes and threads out of the block."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if not lock_within(descriptor, _PATIENCE_S):
            raise ArgumentError(f"another process writes to {str(folder)!r} for {_PATIENCE_S:g} s: end it, try again")
        yield
    finally:
        os.close(descriptor)


def _read(path: Path) -> dict[str, dict[str, Any]]:
    if not path.exists():
        return {}
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        return {str(kind): {"run": each["run"], **each} for kind, each in told["runs"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{str(path)!r} is damaged: {type(error).__name__}: {error}; remove it") from error
