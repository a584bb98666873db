"""Checkpoints of NumPy's arrays, without ranks: written, read, and compared by type and bit."""

import secrets
import struct
from collections import deque
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from multiring.frontend.checkpoint.files import find, finish, open_part, write_part
from multiring.frontend.checkpoint.folder import Attempt, require_ours
from multiring.frontend.checkpoint.framework import Framework
from multiring.frontend.checkpoint.loading import Reading
from multiring.frontend.checkpoint.tree import Builder, Flattener

NAME = "all"


def saved(path: Path, value: Any) -> Path:
    """Return the folder of a checkpoint of `value`, which stands in one part."""
    made = Flattener(Framework.arrays)
    tree = {"value": made.tree(value, NAME)}
    require_ours(path)
    token = secrets.token_hex(8)
    with Attempt(path, token) as attempt:
        attempt.begin()
        write_part(path, NAME, token, (tree, made.arrays))
        finish(path, token, 1, [NAME])
    return path


def loaded(path: Path) -> Any:
    """Return what `saved` was given."""
    place, manifest = find(path)
    with closing(open_part(place, NAME, manifest["token"])) as part:
        reading = Reading(Framework(), part, part.tree, {})
        reading.read(sends=False)
    return Builder(reading.made).value(part.tree["value"])


def same(found: Any, wanted: Any) -> bool:
    """Return whether two values are of one type and have the same bits, at every depth."""
    if isinstance(found, np.generic) and isinstance(wanted, np.generic):  # int64 is one type by two names
        return bool(found.dtype == wanted.dtype and found.tobytes() == wanted.tobytes())
    if type(found) is not type(wanted):
        return False
    if isinstance(wanted, np.ndarray):
        return (found.dtype, found.shape, found.tobytes()) == (wanted.dtype, wanted.shape, wanted.tobytes())
    if isinstance(wanted, Mapping | list | tuple | deque):
        lists = [list(each.items()) if isinstance(each, Mapping) else list(each) for each in (found, wanted)]
        more = [(len(each), vars_of(each)) for each in (found, wanted)]
        return more[0] == more[1] and all(map(same, *lists))
    if isinstance(wanted, float):
        return struct.pack("<d", found) == struct.pack("<d", wanted)
    return bool(found == wanted)


def vars_of(value: Any) -> tuple[Any, Any]:
    """Return what a defaultdict or a deque knows besides."""
    return getattr(value, "default_factory", None), getattr(value, "maxlen", None)
