"""The native core's folders include one another downwards only: rank > operation > kernels > links > memory."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CORE = ROOT / "native" / "core"
FOLDERS = ("rank", "operation", "kernels", "links", "memory")  # from the top
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*["<]([^">]+\.h)[">]', re.MULTILINE)
FILES = sorted(path for path in CORE.rglob("*") if path.is_file())
HEADERS = {path.name: path.parent.name for path in FILES}


def wrong_includes(folder: str, text: str) -> list[str]:
    """Return the core's headers that a file in `folder` includes neither from this folder nor from a lower one.

    An include must be written as `name.h` for the own folder and as `folder/name.h` for a lower folder.
    """
    lower = FOLDERS[FOLDERS.index(folder) + 1 :]
    allowed = {
        name if room == folder else f"{room}/{name}" for name, room in HEADERS.items() if room in {folder, *lower}
    }
    return [each for each in INCLUDE.findall(text) if Path(each).name in HEADERS and each not in allowed]


def test_files_include_downwards_only() -> None:
    assert len(FILES) > 100
    assert len(HEADERS) == len(FILES)  # no file name is used twice
    assert {path.parent.relative_to(CORE).as_posix() for path in FILES} == set(FOLDERS)
    found = {path.name: wrong_includes(path.parent.name, path.read_text("utf-8")) for path in FILES}
    assert {name: wrong for name, wrong in found.items() if wrong} == {}


@pytest.mark.parametrize(
    ("folder", "include"),
    [("links", "memory/frame.h"), ("links", "link.h"), ("links", "string.h"), ("rank", "entry/a.h")],
)
def test_an_include_downwards_is_allowed(folder: str, include: str) -> None:
    assert wrong_includes(folder, f'#include "{include}"\n') == []


@pytest.mark.parametrize(
    ("folder", "include"),
    [
        ("links", "rank/peers.h"),
        ("links", "core/rank/peers.h"),
        ("memory", "../links/link.h"),
        ("memory", "link.h"),
        ("operation", "rank/rank_state.h"),
    ],
)
def test_any_other_include_is_found(folder: str, include: str) -> None:
    assert wrong_includes(folder, f'#pragma once\n#include "{include}"\n# include <{include}>\n') == [include, include]


def test_the_page_lists_the_folders() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    assert tuple(re.findall(r"^\| `(\w+)/` \|.*\| `\w+` \|$", page, re.MULTILINE)) == FOLDERS
