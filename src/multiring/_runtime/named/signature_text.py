"""The label of a named operation: its name and signature as text.

The label is part of what the ranks agree on. The text is JSON, because any thread may parse a label at any time.
`ast.literal_eval` of Python 3.11 fails with a SystemError if two threads run it at the same time
(https://github.com/python/cpython/issues/106905).
"""

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from multiring.errors import Signature

# Separates the description of an operation from its label, in the title on which the ranks agree.
LABELLED = " labelled "

DEVICE = "device"  # the term for the devices of an operation's tensors; a signature without it is of host tensors
STRUCTURE = "structure"  # the term for the paths of a tree's arrays, which `structure_text` writes

Meaning = tuple[str, Signature]  # name and signature of an operation


def label_of(name: str, signature: Signature) -> str:
    """Return the label of a named operation; `meaning_of` reads it."""
    return f"[{json.dumps(name)}, {in_words(signature)}]"


@lru_cache(maxsize=1024)
def in_words(signature: Signature) -> str:
    """Return the signature as text, which `signature_of` parses."""
    return json.dumps(signature)  # cached, because signatures of many tensors are long and repeat


def meaning_of(title: str) -> Meaning | None:
    """Return the name and signature in the label of `title`.

    The result is None if `label_of` did not make the label.
    """
    at = title.find(LABELLED)
    while at >= 0:
        match _value(title[at + len(LABELLED) :]):
            case [str(name), [*rows]] if all(_is_entry(row) for row in rows):
                return name, _as_signature(rows)
        at = title.find(LABELLED, at + 1)  # the separator may also occur before the label
    return None


def signatures_of_one(titles: Mapping[int, str]) -> dict[int, Signature] | None:
    """Return each rank's signature from these titles.

    The result is None if the titles are not all of the same named operation.
    """
    meanings = {rank: meaning_of(title) for rank, title in titles.items()}
    found = {rank: meaning for rank, meaning in meanings.items() if meaning is not None}
    if len(found) < len(meanings) or len({name for name, _ in found.values()}) != 1:
        return None
    return {rank: signature for rank, (_, signature) in found.items()}


def unsaid(term: str) -> str:
    """Return what a signature without this term means."""
    return "cpu" if term == DEVICE else "none"


def path_text(path: str, dtype: str) -> str:
    """Return what a structure says of one array; `path_and_type` reads it."""
    return f"{path}, {dtype}"


def path_and_type(text: str) -> tuple[str, str]:
    """Return the path and the type in a text of `path_text`. The path may contain commas, and the type does not."""
    path, _, dtype = text.rpartition(", ")
    return path, dtype


@lru_cache(maxsize=1024)
def structure_text(paths: tuple[str, ...]) -> str:
    """Return the value of the term STRUCTURE for a tree whose arrays have these paths, in the order of the call."""
    return json.dumps(paths)


def first_difference(signatures: Mapping[int, Signature]) -> tuple[str, dict[int, str]]:
    """Return the term in which the signatures differ, and each rank's value of it for display.

    The term is STRUCTURE if the structures differ: the other differences follow from it. Otherwise it is the first one
    that differs. Each rank's value of STRUCTURE is its version of the first path that differs.

    Args:
        signatures: the ranks' signatures. At least two of them differ.
    """
    by_rank = {rank: dict(each) for rank, each in signatures.items()}
    terms = list(dict.fromkeys(term for each in signatures.values() for term, _ in each))
    differing = [term for term in terms if len({each.get(term) for each in by_rank.values()}) > 1]
    structures = {rank: paths_in(each.get(STRUCTURE)) for rank, each in by_rank.items()}
    others = [term for term in differing if term != STRUCTURE]
    if STRUCTURE in differing and (not others or None not in structures.values()):
        return STRUCTURE, _first_paths(structures)
    first = others[0] if others else "terms"
    return first, {rank: each.get(first, unsaid(first)) for rank, each in by_rank.items()}


def paths_in(text: str | None) -> tuple[str, ...] | None:
    """Return the paths that `structure_text` has written as `text`; None if it has not."""
    match _value(text or ""):
        case [*paths] if all(isinstance(path, str) for path in paths):
            return tuple(paths)
    return None


def _first_paths(structures: Mapping[int, tuple[str, ...] | None]) -> dict[int, str]:
    """Return, for each rank, the first path that differs between the ranks; None stands for an array without keys."""
    place, longest = 0, max(len(paths or ()) for paths in structures.values())
    while place < longest and len({paths and paths[place : place + 1] for paths in structures.values()}) == 1:
        place += 1

    def shown_here(paths: tuple[str, ...] | None) -> str:
        if paths is None:
            return "an array without keys"
        if place < len(paths):
            return f"array {place + 1} of {len(paths)} is {paths[place]}"
        return f"there are only {len(paths)} arrays" if len(paths) != 1 else "there is only 1 array"

    return {rank: shown_here(paths) for rank, paths in structures.items()}


def shown(title: str) -> str:
    """Return `title` for display.

    The label of a named operation is shortened to its name.
    """
    meaning = meaning_of(title)
    if meaning is None:
        return title
    return title.removesuffix(f"{LABELLED}{label_of(*meaning)}") + f", operation {meaning[0]!r}"


def signature_of(text: str) -> Signature:
    """Return the signature that `in_words` has written as `text`."""
    return _as_signature(json.loads(text))


def _is_entry(row: Any) -> bool:
    return isinstance(row, list) and [type(word) for word in row] == [str, str]


def _as_signature(rows: list[list[str]]) -> Signature:
    return tuple((what, value) for what, value in rows)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
