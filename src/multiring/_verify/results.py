"""Results of `multiring verify`: a JSON file of each part, and all of them as one JSON file and one page."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from multiring._replacing import replace_file

PASSED, FAILED, NOT_RUN = "passed", "FAILED", "NOT RUN"
_WRITER = "multiring verify"
_HEAD = "# What multiring does on this machine's GPUs"


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One claim, whether it holds, and what was found."""

    claim: str
    holds: bool
    found: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class PartResult:
    """The result of a part."""

    part: str
    title: str
    machine: str  # devices and versions; a result of another machine is not kept
    status: str  # PASSED, FAILED or NOT_RUN
    reason: str = ""  # why it failed as a whole, or was not run
    seconds: float = 0.0
    checks: Sequence[Check] = ()
    figures: dict[str, Any] = field(default_factory=dict)


def read(path: Path) -> PartResult | None:
    """Return the result that `path` holds; None if there is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found.pop("written by") != _WRITER:
            return None
        checks = [Check(**each) for each in found.pop("checks")]
        return PartResult(checks=checks, **found)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write(path: Path, result: PartResult) -> None:
    """Write a result to `path`."""
    _write_json(path, asdict(result))


def write_all(folder: Path, heading: dict[str, Any], results: Sequence[PartResult]) -> None:
    """Write all results to gpu.json and gpu.md in `folder`."""
    whole = {**heading, "parts": [asdict(each) for each in results]}
    _write_json(folder / "gpu.json", whole)
    page = page_of(heading, results).encode()
    replace_file(folder / "gpu.md", page, is_ours=_is_page, what="the page of results")


def _write_json(path: Path, value: dict[str, Any]) -> None:
    text = json.dumps({"written by": _WRITER, **value}, indent=1) + "\n"
    replace_file(path, text.encode(), is_ours=_is_json, what="results")


def _is_json(data: bytes) -> bool:
    try:
        found = json.loads(data)
    except ValueError:
        return False
    return isinstance(found, dict) and found.get("written by") == _WRITER


def _is_page(data: bytes) -> bool:
    return data.startswith(_HEAD.encode())


def page_of(heading: dict[str, Any], results: Sequence[PartResult]) -> str:
    """Return the results as a page."""
    lines = [_HEAD, ""]
    lines += [f"- {name}: {value}" for name, value in heading.items()]
    for each in results:
        lines += ["", f"## {each.part}: {each.title}", "", f"{each.status}, {each.seconds:.0f} s"]
        if each.reason:
            lines += ["", each.reason]
        if each.checks:
            lines += ["", "| claim | holds | found |", "|---|---|---|"]
            lines += [f"| {_cell(check.claim)} | {_yes(check.holds)} | {_cell(check.found)} |" for check in each.checks]
        if each.figures:
            lines += ["", "| figure | value |", "|---|---|"]
            lines += [f"| {_cell(name)} | {_cell(value)} |" for name, value in each.figures.items()]
    return "\n".join([*lines, ""])


def _yes(holds: bool) -> str:  # noqa: FBT001 -- a value to show
    return "yes" if holds else "**NO**"


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")
