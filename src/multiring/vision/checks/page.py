"""Write the result of a check as one self-contained HTML page with pictures."""

import base64
import html
import io
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from multiring._replacing import replace_file
from multiring.data.readers.limits import library
from multiring.errors import DataError
from multiring.vision.checks.checking import CheckFinding, CheckResult
from multiring.vision.pictures import read_picture

_HEAD = "<!doctype html><html lang=en><head><meta charset=utf-8><meta name=generator content='multiring vision check'>"
_STYLE = """
:root { color-scheme: light dark; }
body { margin: 0 auto; max-width: 68rem; padding: 1.5rem 1rem 4rem; font: 1rem/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.15rem; margin: 2rem 0 .4rem; }
table { border-collapse: collapse; } td, th { text-align: left; padding: .15rem .8rem .15rem 0; }
td.number { text-align: right; font-variant-numeric: tabular-nums; }
.pictures { display: flex; flex-wrap: wrap; gap: .6rem; margin: .2rem 0 1rem; }
figure { margin: 0; width: 7rem; } figcaption { font-size: .75rem; overflow-wrap: anywhere; }
img { max-width: 7rem; max-height: 7rem; display: block; }
"""
_SIDE = 112  # pixels of a thumbnail's longer side
MOST_FINDINGS, MOST_PICTURES = 30, 6  # shown of a kind, and of a finding


def write_check_page(path: Path, folder: Path, result: CheckResult) -> None:
    """Write the page.

    Args:
        path: the file; a page of a former check is replaced.
        folder: the project's folder, with the pictures.
        result: the result of `check_project`.

    Raises:
        ArgumentError: another file is at `path`.
        OSError: the file cannot be written.
    """
    page = "".join(_page(folder, result)).encode("utf-8", "backslashreplace")
    replace_file(path, page, is_ours=lambda found: found.startswith(_HEAD.encode()), what="a page of a check")


def _page(folder: Path, result: CheckResult) -> Iterator[str]:
    title = html.escape(f"Check of {folder.resolve().name}")
    yield f"{_HEAD}<meta name=viewport content='width=device-width'><title>{title}</title><style>{_STYLE}</style>"
    yield f"</head><body><h1>{title}</h1>"
    yield _table(
        ["", "pictures"],
        [
            ("files", result.pictures),
            ("usable", result.usable),
            ("labelled", result.labelled),
            ("labelled, with nothing in them", result.empty),
            *((f"class {name}", count) for name, count in result.classes.items()),
        ],
    )
    kinds = [
        (kind, list(found)) for kind, found in groupby(result.findings, key=lambda each: (each.severity, each.kind))
    ]
    yield (
        "<h2>Findings</h2>" + _table(["severity", "kind", "number"], [(*kind, len(found)) for kind, found in kinds])
        if kinds
        else "<p>Nothing was found.</p>"
    )
    for (severity, kind), found in kinds:
        yield f"<h2>{html.escape(f'{severity}: {kind}')}</h2>"
        for each in found[:MOST_FINDINGS]:
            yield _finding(folder, each)
        if len(found) > MOST_FINDINGS:
            yield f"<p>{len(found) - MOST_FINDINGS} more are in the output of the command with --json.</p>"
    yield "</body></html>\n"


def _table(heads: Sequence[str], rows: Sequence[tuple[object, ...]]) -> str:
    head = "".join(f"<th>{html.escape(each)}</th>" for each in heads)
    body = "".join(
        "<tr>"
        + "".join(
            f"<td class=number>{each}</td>" if isinstance(each, int) else f"<td>{html.escape(str(each))}</td>"
            for each in row
        )
        + "</tr>"
        for row in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>"


def _finding(folder: Path, finding: CheckFinding) -> str:
    pictures = "".join(_figure(folder, path) for path in finding.pictures[:MOST_PICTURES])
    more = len(finding.pictures) - MOST_PICTURES
    shown = f"<div class=pictures>{pictures}{f'<p>and {more} more</p>' if more > 0 else ''}</div>" if pictures else ""
    return f"<p>{html.escape(finding.text)}</p>{shown}"


def _figure(folder: Path, path: str) -> str:
    caption = f"<figcaption>{html.escape(path)}</figcaption>"
    image_library: Any = library("PIL.Image", "vision")
    try:
        image = image_library.fromarray(read_picture(folder / path).pixels)
    except DataError:  # the finding's text says why
        return f"<figure>{caption}</figure>"
    image.thumbnail((_SIDE, _SIDE))
    file = io.BytesIO()
    image.save(file, "JPEG", quality=80)
    data = base64.b64encode(file.getvalue()).decode()
    return f"<figure><img alt='' src='data:image/jpeg;base64,{data}'>{caption}</figure>"
