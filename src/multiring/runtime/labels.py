"""Labels: what a caller adds to what the ranks agree on; that of a named operation holds its name and its terms."""

import ast
from functools import lru_cache
from typing import Any

from multiring.errors import Terms

# Between what an operation does and its label, in the title the ranks agree on.
LABELLED = " labelled "

Meaning = tuple[str, Terms]  # the name, and the terms it comes with


def label_of(name: str, terms: Terms) -> str:
    """Return the label of a named operation; `meaning_of` reads it."""
    return f"({name!r}, {_in_words(terms)})"


@lru_cache(maxsize=1024)
def _in_words(terms: Terms) -> str:
    return repr(terms)  # of many tensors they are long, and come again


def meaning_of(title: str) -> Meaning | None:
    """Return the name and the terms behind `title`; None where its label is none of `label_of`'s."""
    at = title.find(LABELLED)
    while at >= 0:
        match _literal(title[at + len(LABELLED) :]):
            case (str(name), tuple(terms)):
                return name, terms
        at = title.find(LABELLED, at + 1)  # the words may also be part of what comes before
    return None


def shown(title: str) -> str:
    """Return `title` with no more of a named operation's label than its name."""
    meaning = meaning_of(title)
    if meaning is None:
        return title
    return title.removesuffix(f"{LABELLED}{label_of(*meaning)}") + f", operation {meaning[0]!r}"


def terms_of(text: str) -> Terms:
    """Return the terms whose `repr` is `text`."""
    terms: Terms = ast.literal_eval(text)
    return terms


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return None
