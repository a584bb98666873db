"""Train a model on a project: `multiring vision train`, on any number of ranks."""

import dataclasses
import statistics
from collections.abc import Sequence
from contextlib import nullcontext
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, cast

import multiring.torch as mt
from multiring._arguments import is_of, require_path
from multiring.errors import ArgumentError, DataError
from multiring.training import TrainingOptions, TrainingRun, evaluate, read_options
from multiring.training.checkpoints import Checkpoints
from multiring.training.options import given_options
from multiring.training.run_folder import OPTIONS
from multiring.vision.checks.split_files import make_split, read_split, require_undivided
from multiring.vision.fitting.detect_task import DetectTask
from multiring.vision.fitting.fit_options import VisionOptions, recipe_by_size
from multiring.vision.fitting.kinds import build_task, describe
from multiring.vision.fitting.targets import UNSPLIT, LabelledParts, labelled_parts, paths_of, require_enough
from multiring.vision.models.base_weights import BaseWeights, load_base, read_base
from multiring.vision.models.description import DESCRIPTION, ModelDescription
from multiring.vision.models.vision_model import VisionModel, save_model
from multiring.vision.project.folder import VisionProject

DEFAULT_SPLIT = "split"
UNCHOSEN_THRESHOLD = 0.3  # of a detector without a validation part
_OWN_FOLDERS = {"splits", "proposals"}  # in runs, which are no runs
_SHARES = {"train": 0.8, "val": 0.2}
_DESCRIPTION = (
    "Train a model on labelled pictures. `--name NAME` names the run, by default by its kind. The size, the batch, the "
    "epochs, the optimizer with its rates, and more follow the data if they are not given, whatever their defaults "
    "below; options.toml in the run's folder has what was chosen."
)
_AGREEMENT = "vision data"
_PATHS = ("data", "run", "base")  # options that may differ between ranks, on hosts with other folders
_ANEW = "To train anew, remove the folder {}"
Prepared = tuple[VisionOptions, LabelledParts, BaseWeights | None]
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
    given = given_options(VisionOptions, rest, _DESCRIPTION, program=f"multiring vision train {folder}")
    return _train(Path(folder), name or "", given)


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
        DataError: the project or the split cannot be trained on: see `labelled_parts`. Or ranks have other labels,
            another split or other options. If a rank raises an error before the training, all others do, too.
        StateError: the loss is not finite.
    """
    return _train(require_path("folder", folder), name, options)


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
    is_name = is_of(name, str) and name.isascii() and name.replace("-", "a").replace("_", "a").isalnum()
    if not is_name:
        raise ArgumentError(f"run {name!r}: want a name of letters, digits, '-' and '_'")
    if name in _OWN_FOLDERS:
        raise ArgumentError(f"run {name!r}: the folder {name!r} in runs has other files; give another --name")
    place = folder / "runs" / name
    if (place / DESCRIPTION).exists():
        raise ArgumentError(
            f"run {name!r} in {str(folder / 'runs')!r} is finished: give another --name, or remove its folder"
        )
    return place


def _kept_options(place: Path) -> dict[str, Any]:
    """Return the options of an interrupted run, which goes on with them."""
    path = place / OPTIONS
    if not path.exists():
        return {}
    try:
        found = read_options(path, VisionOptions)
    except (ValueError, OSError) as error:
        raise DataError(f"the options of an interrupted run cannot be read: {error}. {_ANEW.format(place)}") from error
    if missing := sorted(set(_DEFAULTS) - set(found)):
        raise DataError(f"{str(path)!r} lacks the option {missing[0]!r}, so it is damaged. {_ANEW.format(place)}")
    return found


def _prepared(folder: Path, name: str, given: dict[str, Any], ranks: int) -> Prepared:
    """Return all options, and the data and the pretrained weights that they choose."""
    if unknown := sorted(set(given) - set(_DEFAULTS)):
        raise ArgumentError(f"{unknown[0]!r} is not an option: want one of {', '.join(sorted(_DEFAULTS))}")
    VisionOptions(**given)  # raises an error if a value is out of its range
    place = _run_folder(folder, name or given.get("kind", _DEFAULTS["kind"]))
    own = {"data": str(folder), "run": str(place)}
    for each, path in own.items():
        if Path(given.get(each, path)).resolve() != Path(path).resolve():
            raise ArgumentError(f"{each}={given[each]!r}: this training's is {path!r}; leave the option {each!r} out")
    told = {**_kept_options(place), **given}
    data = _read(folder, told)
    base = _base(told)
    options = VisionOptions(**{**_recipe(data, told, ranks), **_of_base(base), **told, **own})
    if base is not None:
        if options.architecture != base.architecture:
            raise DataError(
                f"base {options.base!r} is of the architecture {base.architecture}, but the option architecture is "
                f"{options.architecture!r}: leave the option out, or give another base"
            )
        load_base(VisionModel(describe(options, data)).network, base)  # raises an error if it does not fit
    return options, data, base


def _agreed(folder: Path, name: str, given: dict[str, Any]) -> Prepared:
    """Return what `_prepared` does; if it fails on a rank, or if ranks differ, raise an error on every rank."""
    shares = mt.is_initialized() and not given.get("plain", False)
    try:
        options, data, base = _prepared(folder, name, given, mt.size() if shares else 1)
    except Exception as error:
        if shares:
            mt.allgather_object(({}, f"{type(error).__name__}: {error}"), name=_AGREEMENT)
        raise
    if not shares:
        return options, data, base
    facts: dict[str, Any] = {"labels": data.labels_digest[:16], "split": data.split.digest[:16]}
    facts |= {"classes": data.classes, "nothing": data.has_nothing}
    facts |= {f"option {each}": value for each, value in dataclasses.asdict(options).items() if each not in _PATHS}
    told = mt.allgather_object((facts, ""), name=_AGREEMENT)
    for rank, (_, failure) in enumerate(told):
        if failure:
            raise DataError(f"rank {rank} cannot train: {failure}")
    first = told[0][0]
    for rank, (found, _) in enumerate(told):
        for key, value in first.items():
            if found[key] != value:
                raise DataError(
                    f"rank {rank} has {key} {found[key]!r}, and rank 0 has {value!r}: want the same options and the "
                    f"same project, with its labels and splits, on every rank"
                )
    return options, data, base


def _base(told: dict[str, Any]) -> BaseWeights | None:
    """Return the pretrained weights that options name; their digest is that of the training's beginning."""
    if not told.get("base"):
        return None
    found = read_base(told["base"])
    wanted = told.get("base_digest", "")
    if wanted and found.digest != wanted:
        raise DataError(
            f"base {told['base']!r} has the digest {found.digest[:16]}: want {wanted[:16]}, of the option base_digest "
            "or of the interrupted training. Put that file back, or train anew in another run"
        )
    return found


def _of_base(base: BaseWeights | None) -> dict[str, Any]:
    """Return the options that pretrained weights decide."""
    if base is None:
        return {}
    return {"base_digest": base.digest, "architecture": base.architecture, **base.arguments}


def _read(folder: Path, told: dict[str, Any]) -> LabelledParts:
    given = {**_DEFAULTS, **told}
    with VisionProject.open(folder) as project:
        try:
            split = read_split(project, given["split"])
        except DataError:
            if given["split"] != DEFAULT_SPLIT:
                raise
            # Every rank makes the same one. Another rank can have written it since.
            is_there = (project.runs / "splits" / f"{DEFAULT_SPLIT}.json").exists()
            split = read_split(project) if is_there else make_split(project, _SHARES, name=DEFAULT_SPLIT)
        require_undivided(project, split)
        parts = [given["train"]] + [given["val"]] * bool(given["val"])
        data = labelled_parts(project, split, given["kind"], parts)
        require_enough(data, given["train"], given["kind"])
        project.require_unchanged(path for some in data.parts.values() for each in some for path in paths_of(each))
    return data


def _recipe(data: LabelledParts, told: dict[str, Any], ranks: int) -> dict[str, Any]:
    samples = next(iter(data.parts.values()))
    longer = statistics.median(max(each.width, each.height) for each in samples)
    batch, epochs = (max(told.get(each, 0), 0) for each in ("batch", "epochs"))  # `VisionOptions` refuses others
    kind = told.get("kind", _DEFAULTS["kind"])
    has_base = bool(told.get("base"))
    return recipe_by_size(kind, len(samples), int(longer), batch=batch, epochs=epochs, ranks=ranks, has_base=has_base)


def _train(folder: Path, name: str, given: dict[str, Any]) -> Path | None:
    if not given.get("plain", False):
        mt.init()
    options, data, base = _agreed(folder, name, given)
    if unsplit := data.left_out.get(UNSPLIT):
        mt.print_once(
            f"{unsplit} labelled picture{'s' * (unsplit > 1)} in no part of split {data.split.name!r}, which was made "
            "before: not trained on. To use all, make another split, and give its name by the option split"
        )
    described = describe(options, data)
    task = build_task(options, data, described, base)
    run = TrainingRun(task, options)
    run.train()
    if not _is_finished(run, options):
        mt.print_once(f"interrupted at step {run.progress.step}: the same command goes on from there")
        return None
    if not options.plain:
        Checkpoints(run.folder, options.keep).load_best(run.model, run.recipe, run.loader)
    scores: dict[str, float] = {}
    threshold = 0.0
    for part, samples in task.evaluations.items():
        place = (run.rank, run.ranks)
        found = evaluate(run.model, samples, task.measure, batch=options.batch, place=place, recipe=run.recipe)
        run.progress.counts[part], run.progress.losses[part] = found.counts, found.loss
        run.progress.scores[part] = scores = task.scores(found.counts)
    if isinstance(task, DetectTask):
        threshold = task.best_threshold(run.progress.counts[options.val]) if options.val else UNCHOSEN_THRESHOLD
    with nullcontext(True) if options.plain else mt.on_first_rank() as is_first:
        if is_first:
            with run.recipe.average.applied() if run.recipe.average is not None else nullcontext():
                now = datetime.now(timezone.utc).isoformat(timespec="seconds")
                _save(run, dataclasses.replace(described, scores=scores, when=now, threshold=threshold))
    run.write_report(
        model=" ".join([described.architecture, *(f"{name} {value}" for name, value in described.arguments.items())])
    )
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
