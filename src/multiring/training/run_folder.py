"""The files in the folder of a run, and the scores beside its data."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from multiring._arguments import is_of, require_number, require_path, shown
from multiring._file_locks import lock_within
from multiring._replacing import replace_file
from multiring.errors import ArgumentError, UnsupportedError

OPTIONS, METRICS, RESULT, PAGE, PICTURES = "options.toml", "metrics.jsonl", "result.json", "report.html", "pictures"
LOCK = ".lock"  # locked by rank 0 of the training that writes to the folder
BASELINES = "baselines.json"  # beside the data: scores without a network, by method and name

_PATIENCE_S = 5.0  # for a killed training's rank 0, which may end a moment after its launcher


def claim(folder: Path) -> IO[bytes]:
    """Keep a run's folder for this process until it ends, or until the returned file is closed.

    Two trainings in one folder would take each other's checkpoints for their own, also two of one process. The lock is
    the kernel's, so a killed process leaves none. On a file system without locks, nothing is kept.

    Raises:
        ArgumentError: another training has the folder, in this process or another one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = (folder / LOCK).open("ab")
    if not lock_within(file, _PATIENCE_S):
        file.close()
        raise ArgumentError(
            f"another training writes to the run {str(folder)!r}: wait for its end, or give this one another name or "
            "folder"
        )
    return file


def discard_metrics_after(step: int, metrics: Path) -> None:
    """Remove the metrics after `step`: a killed run wrote them after its last checkpoint, and will write them again."""
    if not metrics.exists():
        return
    lines = [json.dumps(each) + "\n" for each in read_metrics(metrics) if each["step"] <= step]
    replace_file(metrics, "".join(lines).encode(), is_ours=_is_of_run, what="the metrics of a run")


def read_metrics(metrics: Path) -> list[dict[str, Any]]:
    """Return the records of a run's metrics. A last line that a killed run has cut off is left out.

    Raises:
        ArgumentError: another line is no record.
    """
    lines = metrics.read_text(encoding="utf-8").split("\n")
    found = []
    for number, line in enumerate(lines[:-1], 1):
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if not isinstance(record, dict) or "step" not in record:
            raise ArgumentError(f"{str(metrics)!r}, line {number}: {line[:100]!r} is no record of a run: remove it")
        found.append(record)
    return found


def write_result(folder: Path, result: dict[str, Any]) -> None:
    """Write the results that the report shows beside the curves."""
    text = json.dumps(result, indent=1)
    replace_file(folder / RESULT, text.encode(), is_ours=_is_of_run, what="the result of a run")


def _is_of_run(_: bytes) -> bool:
    """Return True: a file with this name is the run's, because its training has claimed the folder."""
    return True


def write_report(folder: Path | str) -> Path:
    """Write the report of a run as one self-contained HTML page into the run's folder, and return its path.

    Raises:
        ArgumentError: the folder holds no run, or it has a report.html that is not a run's report.
        UnsupportedError: matplotlib is missing; the message says how to install it.
    """
    try:
        from multiring.training import report  # noqa: PLC0415 -- a training needs no matplotlib
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        raise UnsupportedError(
            "the report needs matplotlib, which is not installed: pip install 'multiring[training]'. Then write the "
            f"report: python -m multiring.training {folder}"
        ) from None
    return report.write(require_path("folder", folder))


def write_baselines(folder: Path | str, scores: dict[str, dict[str, float]]) -> None:
    """Write scores of methods without a network beside the data, in place of earlier ones; the report shows them.

    Args:
        folder: the folder of the data, which is the run's option `data`.
        scores: the scores in percent, by method and by "SET SCORE", as in {"majority": {"val top-1": 10.0}}.

    Raises:
        ArgumentError: the folder has another file with the name baselines.json, or `scores` has something else than
            finite numbers by name.
    """
    path = require_path("folder", folder) / BASELINES
    if not is_of(scores, Mapping) or not all(is_of(row, Mapping) for row in scores.values()):
        raise ArgumentError(
            f"scores={shown(scores)}: want rows of scores by method, as {{'majority': {{'val': 10.0}}}}"
        )
    rows = {
        str(method): {str(name): require_number(f"scores: {name}", value, -math.inf) for name, value in row.items()}
        for method, row in scores.items()
    }
    text = json.dumps(rows, indent=1)
    replace_file(path, text.encode(), is_ours=_is_baselines, what="a file of scores")


def read_baselines(folder: Path | str) -> dict[str, dict[str, float]]:
    """Return the scores that `write_baselines` wrote beside the data; {} if there are none.

    Raises:
        ArgumentError: the folder has another file with the name baselines.json.
    """
    path = Path(folder) / BASELINES
    if not path.exists():
        return {}
    data = path.read_bytes()
    if not _is_baselines(data):
        raise ArgumentError(f"{str(path)!r} holds no scores that write_baselines has written: remove or rename it")
    found: dict[str, dict[str, float]] = json.loads(data)
    return found


def _is_baselines(data: bytes) -> bool:
    try:
        found = json.loads(data)
    except ValueError:
        return False
    return isinstance(found, dict) and all(isinstance(each, dict) for each in found.values())
