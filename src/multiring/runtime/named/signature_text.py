"""An operation's signature as text: the label that a caller adds to what the ranks agree on has its name and signature.

In JSON: any thread may read one at any time, and `ast.literal_eval`, of Python 3.11, fails with a SystemError where two
threads are in it (https://github.com/python/cpython/issues/106905).
"""

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from multiring.errors import Signature

# Between what an operation does and its label, in the title the ranks agree on.
LABELLED = " labelled "

Meaning = tuple[str, Signature]  # the name, and the signature it comes with


def label_of(name: str, signature: Signature) -> str:
    """Return the label of a named operation; `meaning_of` reads it."""
    return f"[{json.dumps(name)}, {in_words(signature)}]"


@lru_cache(maxsize=1024)
def in_words(signature: Signature) -> str:
    """Return the text that `signature_of` reads."""
    return json.dumps(signature)  # of many tensors they are long, and come again


def meaning_of(title: str) -> Meaning | None:
    """Return the name and the signature behind `title`; None where its label is none of `label_of`'s."""
    at = title.find(LABELLED)
    while at >= 0:
        match _value(title[at + len(LABELLED) :]):
            case [str(name), [*rows]] if all(_is_entry(row) for row in rows):
                return name, _as_signature(rows)
        at = title.find(LABELLED, at + 1)  # the words may also be part of what comes before
    return None


def signatures_of_one(titles: Mapping[int, str]) -> dict[int, Signature] | None:
    """Return the signatures that ranks came with to one operation; None where these titles are not all of one name."""
    meanings = {rank: meaning_of(title) for rank, title in titles.items()}
    found = {rank: meaning for rank, meaning in meanings.items() if meaning is not None}
    if len(found) < len(meanings) or len({name for name, _ in found.values()}) != 1:
        return None
    return {rank: signature for rank, (_, signature) in found.items()}


def shown(title: str) -> str:
    """Return `title` with no more of a named operation's label than its name."""
    meaning = meaning_of(title)
    if meaning is None:
        return title
    return title.removesuffix(f"{LABELLED}{label_of(*meaning)}") + f", operation {meaning[0]!r}"


def signature_of(text: str) -> Signature:
    """Return the signature that `in_words` made `text` of."""
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
