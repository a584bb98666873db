"""A run's checkpoints: the last few, and the best one; found again by whoever resumes it."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from examples.training.recipe import Recipe

import multiring.torch as mt
from multiring.data import Loader

FOLDER, BEST = "checkpoints", "best"


class Checkpoints:
    """Where a run saves itself; every rank makes one, and every rank calls it.

    What is equal on all ranks, weights, the optimizer's state, the gradient that waits, how far the data are, is
    saved once, and loads on any number of ranks. A rank's random numbers, its batch norms' statistics, and what its
    compression owes are its own: on another number of ranks they are dropped, which the log says.
    """

    def __init__(self, run: Path, keep: int) -> None:
        self._folder = run / FOLDER
        self._keep = keep

    def save(self, step: int, model: torch.nn.Module, recipe: Recipe, loader: Loader, **values: Any) -> None:
        """Save, and remove what is older than the last few."""
        self._save(f"step-{step:08d}", step, model, recipe, loader, values)
        if mt.rank() == 0:
            for path in self._kept()[: -self._keep]:
                if _is_a_save_alone(path):
                    shutil.rmtree(path, ignore_errors=True)

    def save_best(self, step: int, model: torch.nn.Module, recipe: Recipe, loader: Loader, **values: Any) -> None:
        """Save besides, in place of the best one so far."""
        self._save(BEST, step, model, recipe, loader, values)

    def resume(self, model: torch.nn.Module, recipe: Recipe, loader: Loader) -> dict[str, Any]:
        """Load the last complete one; return the values that were saved with it, or nothing where there is none.

        Raises:
            ArgumentError: it is of another model or data set, or damaged.
        """
        names = mt.broadcast_object([path.name for path in self._kept()] if mt.rank() == 0 else None, name="kept")
        for name in reversed(names):
            path = self._folder / name
            if mt.is_saved(path):
                found = mt.load(path, model=model, optimizer=recipe.optimizer, data=loader)
                mt.print_once(f"going on from {path}")
                return {key: value for key, value in found.items() if key != "own"}
        return {}

    def _save(
        self, name: str, step: int, model: torch.nn.Module, recipe: Recipe, loader: Loader, values: dict[str, Any]
    ) -> None:
        mt.save(self._folder / name, model=model, optimizer=recipe.optimizer, data=loader, step=step, **values)

    def _kept(self) -> list[Path]:
        return sorted(self._folder.glob("step-????????"))


def _is_a_save_alone(path: Path) -> bool:
    """Return whether a folder has a checkpoint, and nothing that somebody else put beside it."""
    try:
        manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
        names = {each.name for each in path.iterdir()}
    except (OSError, ValueError):
        return False
    if not isinstance(manifest, dict) or manifest.get("saver") != "multiring checkpoint":
        return False
    return names == {"manifest.json", f"data-{manifest.get('token')}"}
