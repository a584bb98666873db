"""Edits of a picture's labels, as the page sends them, and how many corrections they are."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from multiring.errors import DataError
from multiring.vision.labels import Label, distinct, from_json
from multiring.vision.project.history import Labels

_MOST_EDITS, _MOST_LABELS = 10_000, 10_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Edited:
    """What edits made of a picture's labels.

    Attributes:
        labels: the labels. None means "not labelled".
        corrections: the work of a person: a label that was added, moved, deleted or relabelled counts as one, and so
            does a proposal that was rejected, moved or relabelled.
        accepted: proposals that became labels unchanged.
    """

    labels: Labels
    corrections: int
    accepted: int


def apply_edits(labels: Labels, edits: Sequence[object], proposals: Sequence[Label]) -> Edited:
    """Return a picture's labels after edits, which are done in their order.

    An edit has a field "do", and others:

    - "add": add "label". If it was made of a proposal, that is in "proposal".
    - "replace": put "label" in the place of the label number "index": it was moved or relabelled.
    - "delete": delete the label number "index".
    - "reject": a proposal, "proposal", is wrong.
    - "nothing": nothing is in the picture. Labels that it had are deleted.
    - "forget": the picture is not labelled.
    - "set": replace all labels by "labels", such as after a conflict. It is no correction, because the labels were
      counted when they were made.

    Args:
        labels: the labels before.
        edits: the edits.
        proposals: what a model or a track proposes for the picture.

    Raises:
        DataError: an edit is malformed, or names a label that is not there.
    """
    if len(edits) > _MOST_EDITS:
        raise DataError(f"{len(edits)} edits at a time: want at most {_MOST_EDITS}")
    state = Edited(labels=labels, corrections=0, accepted=0)
    for edit in edits:
        do = edit.get("do") if isinstance(edit, Mapping) else None
        if not isinstance(edit, Mapping) or not isinstance(do, str) or do not in _ACTS:
            raise DataError(f"edit {str(edit)[:100]!r}: want an object with 'do', one of {', '.join(_ACTS)}")
        if unknown := sorted(map(str, set(edit) - {"do", *_FIELDS[do]})):
            raise DataError(
                f"edit {do!r} has the unknown field {unknown[0]!r}: want {', '.join(_FIELDS[do]) or 'no other field'}"
            )
        after, corrections, accepted = _ACTS[do](state.labels, edit, proposals)
        state = Edited(labels=after, corrections=state.corrections + corrections, accepted=state.accepted + accepted)
    if state.labels is not None:  # only at the end, because the edits name labels by number
        state = replace(state, labels=distinct(state.labels))
    if len(state.labels or ()) > _MOST_LABELS:
        raise DataError(f"{len(state.labels or ())} labels on a picture: want at most {_MOST_LABELS}")
    return state


# Each takes the labels before, an edit and the proposals, and returns the labels after it, the corrections and the
# accepted proposals.
_Edit = Mapping[str, Any]
_Done = tuple[Labels, int, int]


def _add(labels: Labels, edit: _Edit, proposals: Sequence[Label]) -> _Done:
    made = _label(edit, "label")
    is_as_proposed = edit.get("proposal") is not None and _label(edit, "proposal") == made and made in proposals
    return (*(labels or ()), made), int(not is_as_proposed), int(is_as_proposed)


def _replace(labels: Labels, edit: _Edit, proposals: Sequence[Label]) -> _Done:
    del proposals
    place, made, before = _place(edit, labels), _label(edit, "label"), labels or ()
    return (*before[:place], made, *before[place + 1 :]), int(made != before[place]), 0


def _delete(labels: Labels, edit: _Edit, proposals: Sequence[Label]) -> _Done:
    del proposals
    place, before = _place(edit, labels), labels or ()
    return (*before[:place], *before[place + 1 :]), 1, 0


def _reject(labels: Labels, edit: _Edit, proposals: Sequence[Label]) -> _Done:
    del edit, proposals
    return labels, 1, 0


def _nothing(labels: Labels, edit: _Edit, proposals: Sequence[Label]) -> _Done:
    del edit, proposals
    return (), len(labels or ()), 0


def _forget(labels: Labels, edit: _Edit, proposals: Sequence[Label]) -> _Done:
    del edit, proposals
    return None, len(labels or ()), 0


def _set(labels: Labels, edit: _Edit, proposals: Sequence[Label]) -> _Done:
    del labels, proposals
    given = edit.get("labels")
    if "labels" not in edit or (given is not None and not isinstance(given, list)):
        raise DataError(f"edit 'set': labels {str(given)[:100]!r}: want a list, or null for \"not labelled\"")
    return None if given is None else tuple(_from_json(each) for each in given), 0, 0


_ACTS: Mapping[str, Callable[[Labels, _Edit, Sequence[Label]], _Done]] = {
    "add": _add,
    "replace": _replace,
    "delete": _delete,
    "reject": _reject,
    "nothing": _nothing,
    "forget": _forget,
    "set": _set,
}

_FIELDS: Mapping[str, tuple[str, ...]] = {
    "add": ("label", "proposal"),
    "replace": ("index", "label"),
    "delete": ("index",),
    "reject": ("proposal",),
    "nothing": (),
    "forget": (),
    "set": ("labels",),
}
_PLACES = ("box", "polygon", "mask")


def _label(edit: Mapping[str, Any], name: str) -> Label:
    return _from_json(edit.get(name))


def _from_json(told: object) -> Label:
    if not isinstance(told, Mapping):
        raise DataError(f"label {str(told)[:100]!r}: want an object with the field 'class'")
    places = [name for name in _PLACES if name in told]
    unknown = sorted(map(str, set(told) - {"class", "track", "attributes", *_PLACES, *(["crowd"] * ("mask" in told))}))
    if unknown or len(places) > 1:
        what = f"unknown field {unknown[0]!r}" if unknown else f"both {places[0]!r} and {places[1]!r}"
        # A box in fields of another name would become a label of the whole picture.
        raise DataError(
            f"label {str(told)[:100]!r} has {what}: want 'class', one of 'box', 'polygon' and 'mask' for a part of the "
            "picture, and perhaps 'track' and 'attributes'"
        )
    return from_json(told)


def _place(edit: Mapping[str, Any], labels: Sequence[Label] | None) -> int:
    place = edit.get("index")
    count = len(labels or ())
    if type(place) is not int or not 0 <= place < count:
        raise DataError(f"edit {edit.get('do')!r} of label {place!r}: the picture has {count} labels, numbered from 0")
    return place
