"""Find what was wrong with a training from the folder of its run, as `multiring.training` writes it."""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from multiring._diagnosis.findings import FindingKind, HealthFinding
from multiring._strict_json import WrongFieldError, count_at, field_at, number_at, strict_json, table_at, text_at
from multiring.errors import ArgumentError

METRICS, RESULT = "metrics.jsonl", "result.json"
_EXPOSED_MS, _TRAINING_S, _STEPS = "exposed communication, ms a step", "seconds of training", "steps"
_WAITED = 0.2  # of the time of training: waiting for data for longer than this is a finding
_EXPOSED = 0.25  # of a step
_SLOWER = 1.5  # times the steps of the first third
_FEWEST = 9  # records, to compare thirds


def record_findings(folder: Path) -> list[HealthFinding]:
    """Return what was wrong with the run in `folder`.

    Raises:
        ArgumentError: the folder holds no run, or a line of its metrics is damaged. The text names the line.
    """
    path = folder / METRICS
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"{path}: {error}; want the folder of a run of multiring.training") from None
    records = []
    for number, line in enumerate(lines, 1):
        try:
            records += _steps_of(line)
        except ArgumentError as error:
            if number == len(lines):
                break  # the run writes this line now, or was killed while it did
            raise ArgumentError(f"{path}, line {number}: {error}; want a record of multiring.training") from None
    result: dict[str, Any] = {}
    if (folder / RESULT).exists():
        try:
            result = _result_of((folder / RESULT).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, ArgumentError) as error:
            raise ArgumentError(f"{folder / RESULT}: {error}; want the result of a run") from None
    if not records:
        raise ArgumentError(f"{path} has no record of a step; want the folder of a run that has trained")
    return findings_of_records(records, result)


def _steps_of(line: str) -> list[dict[str, float]]:
    """Return the record of a step in a line; an empty list if it is one of something else."""
    try:
        record = table_at(strict_json(line, with_nan=True), ())
        if text_at(record, "kind", ()) != "step":
            return []
        loss = _loss_of(record)
        return [{"loss": loss, **{name: number_at(record, name, ()) for name in ("step", "wall_s", "waited")}}]
    except WrongFieldError as error:
        raise ArgumentError(f"field {'.'.join(map(str, error.path)) or 'of a record'}: {error.words}") from None


def _loss_of(record: Mapping[str, Any]) -> float:
    """Return the loss, which may be infinite or NaN: that is what a finding is about."""
    loss = field_at(record, "loss", ())
    if type(loss) not in (int, float):
        raise WrongFieldError(("loss",), f"{loss!r}: want a number")
    return float(loss)


def _result_of(text: str) -> dict[str, Any]:
    """Return the result in `text`, whose fields that a finding uses are numbers."""
    try:
        result = dict(table_at(strict_json(text, with_nan=True), ()))
        step = table_at(result.get("step", {}), ("step",))
        for name in (_EXPOSED_MS, _TRAINING_S):
            if name in step:
                number_at(step, name, ("step",))
        if _STEPS in step:
            count_at(step, _STEPS, ("step",))
    except WrongFieldError as error:
        raise error.in_text(text) from None
    return result


def findings_of_records(records: Sequence[Mapping[str, float]], result: Mapping[str, Any]) -> list[HealthFinding]:
    """Return what was wrong with a run.

    Args:
        records: the records of steps: step, wall_s, loss, and the share of the time so far that waited for data.
        result: what the run wrote at its end; empty if it has not ended.
    """
    found = []
    broken = next((each for each in records if not math.isfinite(each["loss"])), None)
    if broken is not None:
        found.append(
            HealthFinding(
                kind=FindingKind.LOSS,
                where=f"step {broken['step']:.0f}",
                found=f"the loss is {broken['loss']}",
                todo="lower the learning rate, or lengthen its warm-up; for float16, check the loss scale",
            )
        )
    waited = records[-1]["waited"]
    if waited > _WAITED:
        found.append(
            HealthFinding(
                kind=FindingKind.INPUT,
                where="rank 0",
                found=f"it waited for data for {waited:.0%} of the time of training",
                todo="use more workers or a cache; multiring data bench measures the input alone",
            )
        )
    found += _slowed(records)
    step = result.get("step", {})
    exposed_s = float(step.get(_EXPOSED_MS, 0.0)) * 1e-3
    step_s = float(step.get(_TRAINING_S, 0.0)) / max(1, int(step.get(_STEPS, 1)))
    if step_s > 0 and exposed_s > _EXPOSED * step_s:
        found.append(
            HealthFinding(
                kind=FindingKind.COMMUNICATION,
                where="all ranks",
                found=f"exposed communication took {exposed_s * 1e3:.1f} ms of a step of {step_s * 1e3:.1f} ms",
                todo="run multiring doctor on the hosts; if they are healthy, use larger batches, compression or lag",
                is_certain=False,
            )
        )
    return found


def _slowed(records: Sequence[Mapping[str, float]]) -> list[HealthFinding]:
    """Compare the time of a step in the last third with that in the first. Medians leave out evaluations and pauses."""
    taken = [
        (after["wall_s"] - before["wall_s"]) / (after["step"] - before["step"])
        for before, after in pairwise(records)
        if after["step"] > before["step"]
    ]
    if len(taken) < _FEWEST:
        return []
    third = len(taken) // 3
    first_s, last_s = median(taken[:third]), median(taken[-third:])
    if last_s <= _SLOWER * first_s:
        return []
    begin = next(at for at, each in enumerate(taken) if median(taken[at : at + third]) > _SLOWER * first_s)
    return [
        HealthFinding(
            kind=FindingKind.SLOWED,
            where=f"from step {records[begin]['step']:.0f} on",
            found=f"a step took {last_s * 1e3:.4g} ms, and {first_s * 1e3:.4g} ms at the beginning",
            todo="run multiring doctor on the hosts: another program, heat or a failing link may slow them down",
            is_certain=False,
        )
    ]
