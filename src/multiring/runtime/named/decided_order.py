"""The order that ranks of a set have negotiated: what is posted in it, on a group of its own."""

import logging
from collections.abc import Callable

from multiring.errors import Signature, UnsupportedError
from multiring.runtime.group.group import Group
from multiring.runtime.named.handle import NamedHandle, Start
from multiring.runtime.named.signature_text import label_of

_log = logging.getLogger("multiring")


class DecidedOrder:
    """This rank's part in it. The lock of the set's named operations is held.

    Args:
        group: whose operations come in that order only.
        neutral_contribution: what a rank that has joined contributes to an operation of this signature.
    """

    def __init__(self, group: Group, neutral_contribution: Callable[[Signature], Start] | None) -> None:
        self._group = group
        self._neutral_contribution = neutral_contribution
        self.filled = 0  # the last operation of the optimistic order that was given up last

    def run(self, name: str, signature: Signature, handle: NamedHandle | None) -> None:
        """Post an operation that all ranks post next; without a handle its neutral contribution."""
        label, before = label_of(name, signature), self._group.calls.last
        try:
            posted = self._start_of(signature, handle)(self._group, label)
        except Exception as error:  # noqa: BLE001 -- whoever waits gets it, and the others are told
            if self._group.calls.last == before:
                self._group.calls.decline(label, error)
            if handle is None:
                _log.warning("operation %r: nothing stands in for this rank, which has joined: %s", name, error)
            else:
                handle.fail(error)
        else:
            if handle is not None:
                handle.posted = posted

    def require_neutral_contribution(self, title: str = "") -> Callable[[Signature], Start]:
        """Return what makes this rank's part in the others' operations.

        Raises:
            UnsupportedError: there is nothing that does.
        """
        if self._neutral_contribution is None:
            raise UnsupportedError(f"{title}these operations have no stand-ins")
        return self._neutral_contribution

    def _start_of(self, signature: Signature, handle: NamedHandle | None) -> Start:
        if handle is not None and handle.start is not None:
            return handle.start
        return self.require_neutral_contribution()(signature)
