"""The page of a study: one HTML file that needs nothing else, for `multiring trials page`."""

import json
import math
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from multiring._replacing import replace_file
from multiring.errors import ArgumentError
from multiring.trials.command.words import command_line
from multiring.trials.plan import imported_optuna
from multiring.trials.storage import COMMAND, JUDGED, RANKS, REASON, opened, shown_storage, storage_error

if TYPE_CHECKING:
    from collections.abc import Mapping

    from optuna import Study
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial

_MARK = b"<!-- multiring trials page -->"
_DATA = '"the study"'  # in the page, where the data go


def write_page(storage: str, name: str | None, output: Path | None) -> Path:
    """Write the page of a study and return its path.

    The file has curves of all reports, parallel coordinates, the importance of the parameters, the best trial with its
    command, and all trials. It loads nothing from elsewhere.

    Args:
        storage: a file of SQLite or of a journal, or a URL of SQLAlchemy.
        name: the study; None if the storage has one study.
        output: the page's path; by default the study's name with .html in the current folder.

    Raises:
        ArgumentError: the storage cannot be opened, has no such study, or has several; or `output` exists and is no
            page of a study.
        ImportError: Optuna is not installed.
        OSError: the page cannot be written.
    """
    optuna = imported_optuna()
    if "://" not in storage and not Path(storage).is_file():
        raise ArgumentError(f"storage {storage!r}: there is no such file; want the storage of a study")
    found, _ = opened(storage)
    try:
        studies = {each.study_name: each for each in found.get_all_studies()}
    except Exception as error:  # each storage has errors of its own
        raise storage_error(storage, error) from error
    names = list(studies)
    if name is None and len(names) != 1:
        raise ArgumentError(
            f"storage {shown_storage(storage)} has the studies {names}; want --name NAME with one of them"
        )
    if name is not None and name not in names:
        raise ArgumentError(f"--name {name!r}: the storage has the studies {names}")
    if len(studies[name or names[0]].directions) > 1:
        raise ArgumentError(
            f"storage {shown_storage(storage)}: study {name or names[0]!r} has several values a trial; want one"
        )
    study = optuna.load_study(study_name=name or names[0], storage=found)
    path = output or Path("".join(c if c.isalnum() or c in "-_." else "_" for c in study.study_name) + ".html")
    replace_file(path, page_of(study).encode(), is_ours=lambda data: _MARK in data[:200], what="page of a study")
    return path


def page_of(study: "Study") -> str:
    """Return the page of a study as HTML."""
    page = resources.files("multiring.trials").joinpath("page.html").read_text(encoding="utf-8")
    data = json.dumps(study_data(study), allow_nan=False)
    for character in "<>&":  # so that no text of the study ends the script
        data = data.replace(character, f"\\u{ord(character):04x}")
    return page.replace(_DATA, data, 1)


def study_data(study: "Study") -> dict[str, Any]:
    """Return what the page shows, as values of JSON. Numbers that are not finite become texts."""
    trials = study.get_trials(deepcopy=False)
    complete = [each for each in trials if each.state.name == "COMPLETE" and each.value is not None]
    sign = 1 if study.direction.name == "MINIMIZE" else -1
    best = min(complete, key=lambda each: sign * each.values[0], default=None)
    distributions: dict[str, BaseDistribution] = {}
    for each in trials:
        distributions.update(each.distributions)
    importance, reason = _importance(study, len(complete), len(distributions))
    return {
        "name": study.study_name,
        "direction": study.direction.name.lower(),
        "best": None if best is None else best.number,
        "command": None if best is None else _command(study, best),
        "judged": study.user_attrs.get(JUDGED),
        "axes": [_axis(name, each) for name, each in distributions.items()],
        "importance": importance,
        "importanceReason": reason,
        "trials": [_trial(each) for each in trials],
    }


def _command(study: "Study", best: "FrozenTrial") -> str | None:
    words = study.user_attrs.get(COMMAND)
    if not isinstance(words, list):
        return None
    return command_line(words, best.params, best.number, len(best.user_attrs.get(RANKS, [0])))


def _importance(study: "Study", complete: int, parameters: int) -> tuple[dict[str, float], str]:
    """Return Optuna's importance of each parameter; or why there is none."""
    import optuna  # noqa: PLC0415 -- as in space.py

    if complete < 2 or parameters == 0:
        return {}, f"{complete} trials are complete; want 2 or more"
    try:
        found = optuna.importance.get_param_importances(study)
    except (ValueError, RuntimeError, ImportError) as error:  # as if all values are equal
        return {}, str(error)
    return {name: float(value) for name, value in found.items() if math.isfinite(value)}, ""


def _axis(name: str, distribution: "BaseDistribution") -> dict[str, Any]:
    facts: Mapping[str, Any] = vars(distribution)
    if "choices" in facts:
        return {"name": name, "choices": [str(each) for each in facts["choices"]]}
    return {"name": name, "low": facts["low"], "high": facts["high"], "log": bool(facts["log"])}


def _trial(each: "FrozenTrial") -> dict[str, Any]:
    seconds = None if each.duration is None else each.duration.total_seconds()
    names = {"COMPLETE": "complete", "PRUNED": "pruned", "FAIL": "failed", "RUNNING": "running", "WAITING": "waiting"}
    reports = sorted(each.intermediate_values.items())
    places = {
        name: distribution.to_internal_repr(each.params[name]) for name, distribution in each.distributions.items()
    }
    return {
        "number": each.number,
        "state": names[each.state.name],
        "value": _number(each.values[0]) if each.values else None,
        "params": {name: str(value) for name, value in each.params.items()},
        "places": {name: _number(value) for name, value in places.items()},
        "reports": [[step, _number(value)] for step, value in reports],
        "reason": str(each.user_attrs.get(REASON, "")),
        "seconds": seconds,
    }


def _number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)
