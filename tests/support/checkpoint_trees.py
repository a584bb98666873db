"""Checkpoints of NumPy arrays without ranks: write, read, and compare by type and bit."""

import secrets
import struct
from collections import deque
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from multiring._frontend.checkpoint.files import find, finish, open_part, write_part
from multiring._frontend.checkpoint.folder import SaveAttempt, require_ours
from multiring._frontend.checkpoint.framework import Framework
from multiring._frontend.checkpoint.loading import Reading
from multiring._frontend.checkpoint.tree import Builder, Flattener

NAME = "all"


def saved(path: Path, value: Any) -> Path:
    """Write a checkpoint of `value` as a single part; return its folder."""
    made = Flattener(Framework.arrays)
    tree = {"value": made.tree(value, NAME)}
    require_ours(path)
    token = secrets.token_hex(8)
    with SaveAttempt(path, token) as attempt:
        attempt.begin()
        write_part(path, NAME, token, (tree, made.arrays))
        finish(path, token, 1, [NAME])
    return path


def loaded(path: Path) -> Any:
    """Return the value of a checkpoint written by `saved`."""
    place, manifest = find(path)
    with closing(open_part(place, NAME, manifest["token"])) as part:
        reading = Reading(Framework(), part, part.tree, {})
        reading.read(sends=False)
    return Builder(reading.made).value(part.tree["value"])


def same(found: Any, wanted: Any) -> bool:
    """Return whether two values have the same types and bits at every depth."""
    if isinstance(found, np.generic) and isinstance(wanted, np.generic):  # NumPy has two types for int64
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
    """Return the default factory of a defaultdict and the maximal length of a deque, if any."""
    return getattr(value, "default_factory", None), getattr(value, "maxlen", None)
