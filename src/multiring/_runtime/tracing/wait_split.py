"""How the waits of a rank's threads divide: until other ranks had come, and while data moved."""

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from multiring._runtime.tracing.event_log import Raw

Rows = NDArray[np.int64]  # shape (events, 8): the columns of `Raw`
_OPERATION, _WAIT = 0, 1
_WAITING, _ABSENT, _MOVING, _FIELD = 1, 1 << 20, 1 << 40, (1 << 20) - 1
_KIND, _BYTES, _START, _AGREED, _END = 0, 4, 5, 6, 7


class WaitSplit(NamedTuple):
    """Times in seconds, as of the union of all threads' waits and of all operations."""

    collective_s: float  # operations moved data
    exposed_s: float  # of that, a thread waited
    peers_s: float  # a thread waited until other ranks had come, and no operation moved data
    size_bytes: int  # of the operations that ended


def rows_of(events: Sequence[Raw]) -> Rows:
    """Return events as an array."""
    # The number of a group has 64 bits. Times and bytes have fewer.
    return np.fromiter(chain.from_iterable(events), np.uint64, 8 * len(events)).reshape(-1, 8).view(np.int64)


def ended_after(rows: Rows, begin_s: float) -> Rows:
    """Return the rows of events that ended after a time of the monotonic clock."""
    return rows[rows[:, _END] > begin_s * 1e9]


def split_of(rows: Rows, begin_s: float = -np.inf, end_s: float = np.inf) -> WaitSplit:
    """Return the times between `begin_s` and `end_s` of the monotonic clock, of events in any order."""
    begin_ns, end_ns = begin_s * 1e9, end_s * 1e9
    waits = rows[rows[:, _KIND] == _WAIT]
    operations = rows[(rows[:, _KIND] == _OPERATION) & (rows[:, _AGREED] > 0)]
    parts = [
        (_WAITING, waits[:, _START], waits[:, _END]),
        (_ABSENT, operations[:, _START], operations[:, _AGREED]),
        (_MOVING, operations[:, _AGREED], operations[:, _END]),
    ]
    # At each moment, a field of the sum counts the open spans of a part.
    moments = np.concatenate([each for _, *spans in parts for each in spans]).clip(begin_ns, end_ns)
    changes = np.repeat([sign * one for one, *_ in parts for sign in (1, -1)], [len(x) for _, *s in parts for x in s])
    order = np.argsort(moments)
    opened, seconds = np.cumsum(changes[order])[:-1], np.diff(moments[order]) * 1e-9
    waiting, absent, moving = ((opened & each * _FIELD) != 0 for each in (_WAITING, _ABSENT, _MOVING))
    ended = operations[:, _END]
    return WaitSplit(
        collective_s=float(seconds @ moving),
        exposed_s=float(seconds @ (moving & waiting)),
        peers_s=float(seconds @ (absent & waiting & ~moving)),
        size_bytes=int(operations[(ended > begin_ns) & (ended <= end_ns), _BYTES].sum()),
    )
