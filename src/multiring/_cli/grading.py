"""Print the grade of `multiring simulate --published`."""

import json
from dataclasses import asdict, fields

from multiring._cli.output import show
from multiring._simulator.grades import Grade, GradedRow, ScalingConstants, grade_of
from multiring._simulator.published import published_rows

# Fewer rows say little.
_ENOUGH = 7


def show_grade(path: str, *, as_json: bool) -> int:
    """Print the predictions of the rows in a file and their grade, and return 0."""
    grade = grade_of(published_rows(path))
    if as_json:
        show(json.dumps(_described(grade), indent=1))
        return 0
    names = max(len(each.row.name) for each in grade.rows)
    show(f"{'row':{names}}  published    predicted  error")
    for each in grade.rows:
        row = each.row
        published = f"{row.low:.1%}" if row.low == row.high else f"{row.low:.1%}-{row.high:.1%}"
        words = f"  not counted: {row.uncounted}" if row.uncounted else ""
        show(f"{row.name:{names}}  {published:<11}  {each.predicted:9.1%}  {100 * each.error:5.1f}{words}")
    show(_summary(grade))
    return 0


def _summary(grade: Grade) -> str:
    counted, constants = grade.counted, grade.constants
    few = f" Fewer than {_ENOUGH} rows say little." if len(counted) < _ENOUGH else ""
    right = f"{grade.pairs_right} of {grade.pairs}" if grade.pairs else "none of 0"
    lines = [
        f"{len(counted)} of {len(grade.rows)} rows count. Each was predicted by constants fitted without it.{few}",
        (
            f"Mean error: {100 * grade.error:.2f} points. Best constant guess: {100 * grade.error_of_constant:.2f}. "
            f"Line over bytes per compute: {100 * grade.error_of_regression:.2f}."
        ),
        f"Worst row: {grade.worst.row.name}, {100 * grade.worst.error:.1f} points.",
        f"Order right: {right} pairs more than 4 points apart.",
        (
            f"Constants fitted to all counted rows (mean error {100 * grade.error_fitted:.2f} points), "
            "and the mean error with one of them less or more by half:"
        ),
    ]
    for field, less, more in zip(fields(ScalingConstants), grade.errors_halved, grade.errors_raised, strict=True):
        lines.append(
            f"  {field.name} {getattr(constants, field.name):.3g}: {100 * less:.2f} with half of it, "
            f"{100 * more:.2f} with half more"
        )
    return "\n".join(lines)


def _described(grade: Grade) -> dict[str, object]:
    """Return the JSON object. Efficiencies and errors are parts of 1."""
    return {
        "rows": [_row(each) for each in grade.rows],
        "counted": len(grade.counted),
        "error": grade.error,
        "error_of_constant": grade.error_of_constant,
        "error_of_regression": grade.error_of_regression,
        "worst": {"row": grade.worst.row.name, "error": grade.worst.error},
        "pairs": grade.pairs,
        "pairs_right": grade.pairs_right,
        "constants": asdict(grade.constants),
        "error_fitted": grade.error_fitted,
        "errors_halved": grade.errors_halved,
        "errors_raised": grade.errors_raised,
    }


def _row(each: GradedRow) -> dict[str, object]:
    row = each.row
    return {
        "name": row.name,
        "ranks": row.ranks,
        "relative_to": row.relative_to,
        "published": [row.low, row.high],
        "predicted": each.predicted,
        "error": each.error,
        "uncounted": row.uncounted,
    }
