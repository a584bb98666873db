"""Operations whose ranks first agree how the operation runs: one small reduction, and then what follows from it.

Each rank contributes whether it can take the better way. The minimum over the ranks decides. The agreement is matched
by name like any operation. So the ranks agree on shapes and types, and may start operations in different orders. One
thread of each rank starts what follows, in the order in which the agreements were posted. This order is the same on all
ranks.
"""

import queue
import threading
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from multiring._runtime import Group, Handle
from multiring._runtime.group.starting import start_agreement
from multiring.errors import MultiringError

DEVICE_PATH = "device path"  # the term of operations whose ranks first agree how they reduce tensors on devices

Follow = Callable[[], object]


class FollowUps:
    """What follows the agreements of one process set."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._jobs: queue.SimpleQueue[tuple[Handle, Follow] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    @property
    def staged(self) -> Group:
        """The group in host memory for what follows; only this object's thread posts operations on it."""
        return self._group.twin_for("what follows an agreement on devices")

    def agree(self, group: Group, label: str, flag: NDArray[np.uint8], follow: Follow) -> Handle:
        """Post an agreement, and return its handle. The caller holds the lock of the set's named operations.

        Args:
            group: the group on which the ranks agree.
            label: the operation's label.
            flag: one number, 1 if this rank can take the better way; afterwards the minimum over all ranks.
            follow: is called on this object's thread after the agreement, unless the agreement fails. It must not
                raise, and it must not wait for other ranks.
        """
        agreement = start_agreement(group.calls, flag, "min", label, waits=False)
        if self._thread is None:
            self._thread = threading.Thread(
                target=_follow_all, args=(self._jobs,), name="multiring follow-ups", daemon=True
            )
            self._thread.start()
        self._jobs.put((agreement, follow))
        return agreement

    def close(self) -> None:
        """End the thread after the operations that have been posted."""
        if self._thread is not None:
            self._thread = None
            self._jobs.put(None)


def _follow_all(jobs: "queue.SimpleQueue[tuple[Handle, Follow] | None]") -> None:
    while (job := jobs.get()) is not None:
        agreement, follow = job
        try:
            agreement.wait()
        except MultiringError:  # the operation fails, or is posted again in the negotiated order
            pass
        else:
            follow()
        del job, agreement, follow  # they hold the operation's tensors
