"""The negotiated order of a set: its operations are posted on a dedicated group."""

import logging
from collections.abc import Callable

from multiring._runtime.group.group import Group
from multiring._runtime.named.handle import NamedHandle, Start
from multiring._runtime.named.signature_text import label_of
from multiring.errors import Signature, UnsupportedError

_log = logging.getLogger("multiring")


class DecidedOrder:
    """This rank's part in the negotiated order.

    The caller must hold the lock of the set's named operations.

    Args:
        group: a group that is used for operations of the negotiated order only.
        neutral_contribution: returns, for a signature, the start function of a rank that has joined.
    """

    def __init__(self, group: Group, neutral_contribution: Callable[[Signature], Start] | None) -> None:
        self._group = group
        self._neutral_contribution = neutral_contribution
        self.filled = 0  # the number of the last operation in the latest optimistic order

    def run(self, name: str, signature: Signature, handle: NamedHandle | None) -> None:
        """Post the next operation of the negotiated order.

        If `handle` is None, post this rank's neutral contribution to the operation.
        """
        label, before = label_of(name, signature), self._group.calls.last
        try:
            posted = self._start_of(signature, handle)(self._group, label)
        except Exception as error:  # noqa: BLE001 -- the handle's `wait` raises it, and the other ranks raise too
            if self._group.calls.last == before:
                self._group.calls.decline(label, error)
            if handle is None:
                _log.warning("operation %r: this rank has joined, but its neutral contribution failed: %s", name, error)
            else:
                handle.fail(error)
        else:
            if handle is not None:
                handle.posted = posted

    def require_neutral_contribution(self, title: str = "") -> Callable[[Signature], Start]:
        """Return the function that makes this rank's neutral contributions.

        Raises:
            UnsupportedError: there is no such function.
        """
        if self._neutral_contribution is None:
            raise UnsupportedError(f"{title}these operations have no neutral contributions")
        return self._neutral_contribution

    def _start_of(self, signature: Signature, handle: NamedHandle | None) -> Start:
        if handle is not None and handle.start is not None:
            return handle.start
        return self.require_neutral_contribution()(signature)
