"""A run's checkpoints: the last few and the best one, from which a later process resumes."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch

import multiring.torch as mt
from multiring.data import Loader
from multiring.training.recipe import TrainingRecipe

FOLDER, BEST = "checkpoints", "best"


class Checkpoints:
    """Saves and resumes a run. Every rank makes one, and every rank calls its methods.

    State that is equal on all ranks (weights, the optimizer's state, a delayed gradient, the position in the data) is
    saved once, and loads on any number of ranks. Each rank also saves its own random numbers, statistics of batch
    norms, and compression error. On another number of ranks these are dropped, and the log says so.
    """

    def __init__(self, run: Path, keep: int) -> None:
        self._folder = run / FOLDER
        self._keep = keep

    def save(self, step: int, model: torch.nn.Module, recipe: TrainingRecipe, loader: Loader, **values: Any) -> None:
        """Save a checkpoint, and remove all but the last few."""
        self._save(f"step-{step:08d}", step, model, recipe, loader, values)
        if mt.local_rank() == 0:  # hosts may have disks of their own
            for path in self._kept()[: -self._keep]:
                if _is_a_save_alone(path):
                    shutil.rmtree(path, ignore_errors=True)

    def save_best(
        self, step: int, model: torch.nn.Module, recipe: TrainingRecipe, loader: Loader, **values: Any
    ) -> None:
        """Save a checkpoint as the best one, in place of the former best."""
        self._save(BEST, step, model, recipe, loader, values)

    def is_there(self) -> bool:
        """Return on every rank whether there is a checkpoint to resume from; every rank calls it."""
        return any(mt.is_saved(self._folder / name) for name in reversed(self._names()))

    def resume(self, model: torch.nn.Module, recipe: TrainingRecipe, loader: Loader) -> dict[str, Any]:
        """Load the last complete checkpoint; return its additional values, or {} if there is no checkpoint.

        Raises:
            ArgumentError: the checkpoint is of another model or data set, or damaged.
        """
        for name in reversed(self._names()):
            path = self._folder / name
            if mt.is_saved(path):
                found = mt.load(path, model=model, optimizer=recipe.optimizer, data=loader)
                mt.print_once(f"going on from {path}")
                return {key: value for key, value in found.items() if key != "own"}
        return {}

    def load_best(self, model: torch.nn.Module, recipe: TrainingRecipe, loader: Loader) -> bool:
        """Load the best checkpoint after a training; return False, and load nothing, if there is none.

        `recipe.average`, if there is one, has the averaged weights, which are those that were evaluated.

        Raises:
            ArgumentError: the checkpoint is of another model or data set, or damaged.
        """
        path = self._folder / BEST
        if not mt.is_saved(path):
            return False
        mt.load(path, model=model, optimizer=recipe.optimizer, data=loader)
        return True

    def _save(
        self,
        name: str,
        step: int,
        model: torch.nn.Module,
        recipe: TrainingRecipe,
        loader: Loader,
        values: dict[str, Any],
    ) -> None:
        mt.save(self._folder / name, model=model, optimizer=recipe.optimizer, data=loader, step=step, **values)

    def _names(self) -> list[str]:
        """Return the names of the checkpoints that any rank finds, the oldest first; the same on all ranks."""
        found: list[list[str]] = mt.allgather_object([path.name for path in self._kept()], name="kept")
        return sorted(set().union(*found))

    def _kept(self) -> list[Path]:
        return sorted(self._folder.glob("step-????????"))


def _is_a_save_alone(path: Path) -> bool:
    """Return whether a folder has a checkpoint and nothing else."""
    try:
        manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
        names = {each.name for each in path.iterdir()}
    except (OSError, ValueError):
        return False
    if not isinstance(manifest, dict) or manifest.get("saver") != "multiring checkpoint":
        return False
    return names == {"manifest.json", f"data-{manifest.get('token')}"}
