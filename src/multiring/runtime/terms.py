"""Names and terms: a named operation as the text that the ranks agree on, and what is said where they do not."""

import ast
from collections.abc import Mapping

from multiring.errors import DisagreementError, Terms
from multiring.runtime.calls import LABELLED
from multiring.runtime.handles import told_apart

Meaning = tuple[str, Terms]  # the name, and the terms it comes with


def label_of(name: str, terms: Terms) -> str:
    """Return the label of a named operation; `meaning_of` reads it."""
    return repr((name, terms))


def meaning_of(title: str) -> Meaning | None:
    """Return the name and the terms behind `title`; None where its label is none of `label_of`'s."""
    at = title.find(LABELLED)
    while at >= 0:
        try:
            found = ast.literal_eval(title[at + len(LABELLED) :])
        except (ValueError, SyntaxError):  # the words may also be part of what comes before
            found = None
        match found:
            case (str(name), tuple(terms)):
                return name, terms
        at = title.find(LABELLED, at + 1)
    return None


def disagreement(name: str, terms: Mapping[int, Terms]) -> DisagreementError:
    """Return the error for `name`, to which the ranks of the set came with these terms, not all the same."""
    by_rank = {rank: dict(each) for rank, each in terms.items()}
    keys = list(dict.fromkeys(key for each in terms.values() for key, _ in each))
    differing = [key for key in keys if len({each.get(key) for each in by_rank.values()}) > 1]
    first = differing[0] if differing else "terms"
    said = {rank: each.get(first, "none") for rank, each in by_rank.items()}
    text = f"operation {name!r}: the ranks do not agree on the {first}: {told_apart(said)}; inputs are intact"
    return DisagreementError(text, terms)
