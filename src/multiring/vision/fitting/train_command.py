"""Train a model on a project: `multiring vision train`, on any number of ranks."""

import dataclasses
import statistics
from collections.abc import Sequence
from contextlib import nullcontext
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, cast

import multiring.torch as mt
from multiring.errors import ArgumentError, DataError
from multiring.training import TrainingOptions, TrainingRun, evaluate, parse_options, read_options
from multiring.training.checkpoints import Checkpoints
from multiring.training.run_folder import OPTIONS
from multiring.vision.checks.split_files import make_split, read_split
from multiring.vision.fitting.detect_task import DetectTask
from multiring.vision.fitting.fit_options import VisionOptions, options_class, recipe_by_size
from multiring.vision.fitting.kinds import build_task, describe
from multiring.vision.fitting.targets import LabelledParts, labelled_parts, require_enough
from multiring.vision.models.description import DESCRIPTION, ModelDescription
from multiring.vision.models.vision_model import VisionModel, save_model
from multiring.vision.project.folder import VisionProject

DEFAULT_SPLIT = "split"
UNCHOSEN_THRESHOLD = 0.3  # of a detector without a validation part
_SHARES = {"train": 0.8, "val": 0.2}
# Options that decide which data are read, and on which other options depend.
_EARLY = ("kind", "split", "train", "val", "batch", "epochs")
_DEFAULTS: dict[str, Any] = {each.name: each.default for each in dataclasses.fields(VisionOptions)}


def train_command(folder: Path | str, words: Sequence[str]) -> Path | None:
    """Train by a command line, and return the run's folder on rank 0; None if the training was interrupted.

    Args:
        folder: the project's folder.
        words: the flags of `VisionOptions`, and `--name`, the run's name in the folder runs (by default, the kind).

    Raises:
        ArgumentError, DataError: as of `train_model`.
    """
    name, rest = _taken(words, "--name")
    given = {each: value for each in _EARLY if (value := _taken(words, f"--{each}")[0]) is not None}
    place = _run_folder(Path(folder), name or given.get("kind", _DEFAULTS["kind"]))
    kept = _kept_options(place)
    told = {**kept, **given}
    data = _read(Path(folder), told)
    defaults = {**_recipe(data, told), **kept, "data": str(folder), "run": str(place)}
    return _train(parse_options(options_class(defaults), rest, "Train a model on labelled pictures."), data)


def train_model(folder: Path | str, *, name: str = "", **options: Any) -> Path | None:
    """Train a model on a project's split, and return the run's folder on rank 0; None if it was interrupted.

    A run that was killed or interrupted goes on, if the function is called again with the same name. Every rank of a
    job calls it. The run's folder gets model.safetensors, model.json and the report of the training.

    Args:
        folder: the project's folder.
        name: the name of the run in the folder runs; by default, the kind.
        options: values of `VisionOptions`. Those that are not given depend on the amount of data.

    Raises:
        ArgumentError: an option is wrong, or the run is finished.
        DataError: the project or the split cannot be trained on: see `labelled_parts`.
        StateError: the loss is not finite.
    """
    if unknown := sorted(set(options) - set(_DEFAULTS)):
        raise ArgumentError(f"{unknown[0]!r} is not an option: want one of {', '.join(sorted(_DEFAULTS))}")
    place = _run_folder(Path(folder), name or options.get("kind", _DEFAULTS["kind"]))
    given = {**_kept_options(place), **options}
    data = _read(Path(folder), given)
    return _train(VisionOptions(**{**_recipe(data, given), **given, "data": str(folder), "run": str(place)}), data)


def _taken(words: Sequence[str], flag: str) -> tuple[str | None, list[str]]:
    """Return the value of a flag, None if it is not given, and the other words."""
    rest = list(words)
    for number, word in enumerate(rest):
        if word == flag and number + 1 < len(rest):
            return rest[number + 1], rest[:number] + rest[number + 2 :]
        if word.startswith(f"{flag}="):
            return word.partition("=")[2], rest[:number] + rest[number + 1 :]
    return None, rest


def _run_folder(folder: Path, name: str) -> Path:
    if not name or not name.isascii() or not name.replace("-", "a").replace("_", "a").isalnum():
        raise ArgumentError(f"run {name!r}: want a name of letters, digits, '-' and '_'")
    place = folder / "runs" / name
    if (place / DESCRIPTION).exists():
        raise ArgumentError(
            f"run {name!r} in {str(folder / 'runs')!r} is finished: give another --name, or remove its folder"
        )
    return place


def _kept_options(place: Path) -> dict[str, Any]:
    """Return the options of an interrupted run, which goes on with them."""
    path = place / OPTIONS
    return read_options(path, VisionOptions) if path.exists() else {}


def _read(folder: Path, told: dict[str, Any]) -> LabelledParts:
    given = {**_DEFAULTS, **told}
    with VisionProject.open(folder) as project:
        try:
            split = read_split(project, given["split"])
        except DataError:
            if given["split"] != DEFAULT_SPLIT or (folder / "runs" / "splits" / f"{DEFAULT_SPLIT}.json").exists():
                raise
            # Every rank makes the same one.
            split = make_split(project, _SHARES, name=DEFAULT_SPLIT)
        parts = [given["train"]] + [given["val"]] * bool(given["val"])
        data = labelled_parts(project, split, given["kind"], parts)
    require_enough(data, given["train"])
    return data


def _recipe(data: LabelledParts, told: dict[str, Any]) -> dict[str, Any]:
    samples = next(iter(data.parts.values()))
    longer = statistics.median(max(each.width, each.height) for each in samples)
    try:
        batch, epochs = (int(told.get(each, 0)) for each in ("batch", "epochs"))
    except ValueError:  # the options' parser says so
        batch = epochs = 0
    return recipe_by_size(told.get("kind", _DEFAULTS["kind"]), len(samples), int(longer), max(batch, 0), max(epochs, 0))


def _train(options: VisionOptions, data: LabelledParts) -> Path | None:
    described = describe(options, data)
    task = build_task(options, data, described)
    run = TrainingRun(task, options)
    run.train()
    if not _is_finished(run, options):
        mt.print_once(f"interrupted at step {run.progress.step}: the same command goes on from there")
        return None
    if not options.plain:
        Checkpoints(run.folder, options.keep).load_best(run.model, run.recipe, run.loader)
    scores: dict[str, float] = {}
    threshold = 0.0
    for name, samples in task.evaluations.items():
        place = (run.rank, run.ranks)
        found = evaluate(run.model, samples, task.measure, batch=options.batch, place=place, recipe=run.recipe)
        run.progress.counts[name], run.progress.losses[name] = found.counts, found.loss
        run.progress.scores[name] = scores = task.scores(found.counts)
    if isinstance(task, DetectTask):
        threshold = task.best_threshold(run.progress.counts[options.val]) if options.val else UNCHOSEN_THRESHOLD
    with nullcontext(True) if options.plain else mt.on_first_rank() as is_first:
        if is_first:
            with run.recipe.average.applied() if run.recipe.average is not None else nullcontext():
                now = datetime.now(timezone.utc).isoformat(timespec="seconds")
                _save(run, dataclasses.replace(described, scores=scores, when=now, threshold=threshold))
    run.write_report(model=f"{described.architecture}, width {options.width}")
    return run.folder if run.rank == 0 else None


def _save(run: TrainingRun, described: ModelDescription) -> None:
    save_model(run.folder, cast("VisionModel", run.model), described)


def _is_finished(run: TrainingRun, options: TrainingOptions) -> bool:
    """Return whether a training came to its end, by its steps or its minutes; the same on every rank."""
    if run.progress.step >= run.total_steps:
        return True
    if not options.minutes:
        return False
    times = [run.progress.trained_s] if options.plain else mt.allgather_object(run.progress.trained_s, name="trained")
    return max(times) > options.minutes * 60
