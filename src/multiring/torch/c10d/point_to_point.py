"""Messages between two ranks of a process group, in any order, with tags; a receive may accept any source."""

import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from multiring._runtime import Handle
from multiring._runtime.group.point_to_point import AnySourceMatching
from multiring._runtime.group.receives import PostedReceive
from multiring.torch.c10d.arguments import one_of, require_rank
from multiring.torch.c10d.buffers import as_bytes, contents, place_for, require_host
from multiring.torch.c10d.errors import RefusedError
from multiring.torch.c10d.group_state import GroupState, ReadyOperation
from multiring.torch.c10d.work import OperationWork
from multiring.torch.interop import described

_MOST_TAG = (1 << 63) - 1  # the ranks tell each other tags in 8 bytes

Settle = Callable[[], None] | None


class MessageWork(OperationWork):
    """The Work of a message, a send or a receive."""

    in_order = False  # ranks may start messages in different orders
    consequence = "no more messages go between the two ranks under this tag"

    def _source_rank(self) -> int:
        """Return the sender's rank in the group; for a receive from any source, only after the message has arrived.

        Raises:
            RuntimeError: this is a send, or no message has arrived yet.
        """
        source = self._handle.source if isinstance(self._handle, PostedReceive) else None
        if source is None:
            raise RuntimeError(f"{self._what}: only a receive has a source, and only after its wait()")
        return source

    source_rank = _source_rank


def send(state: GroupState, tensors: Any, to: int, tag: int = 0) -> Any:
    """Send a tensor to rank `to` of the group; a message to this rank itself is copied at once.

    Args:
        state: the process group.
        tensors: a tensor, or a list of one tensor. The receiver's tensor may have another type and shape, but must have
            the same number of bytes.
        to: the receiver's rank.
        tag: the tag of the matching receive, below 2**63. Messages between two ranks with the same tag arrive in order.
    """
    tensor = _checked("send", tensors, tag)
    require_rank("send", "destination", to, state.group.size)
    what = f"send of {described(tensor)} to rank {to}, tag {tag}"
    memory = as_bytes(contents(tensor))
    return _issue_message(state, what, partial(state.part(AnySourceMatching).send, memory, to, tag), tensor)


def recv(state: GroupState, tensors: Any, source: int, tag: int = 0) -> Any:
    """Receive a tensor from rank `source` of the group; see `send`."""
    require_rank("recv", "source", source, state.group.size)
    return _receive(state, "recv", tensors, source, tag)


def recv_anysource(state: GroupState, tensors: Any, tag: int = 0) -> Any:
    """Receive a message from any rank, if no earlier receive matches the message; the Work reports the sender."""
    return _receive(state, "recv", tensors, None, tag)


def decline_message(state: GroupState, name: str, arguments: Sequence[Any], error: Exception) -> None:
    """Make the other rank of a message raise, because this rank could not prepare it.

    Args:
        state: the process group.
        name: "send", "recv" or "recv_anysource".
        arguments: the arguments of the call: the tensors; the other rank, if it is named; the tag, if it is given.
        error: the error that this rank raises.
    """
    matching = state.part(AnySourceMatching)
    if name == "send":
        matching.decline_send(error, *arguments[1:3])
    else:
        matching.decline_recv(error, *((None, *arguments[1:2]) if name == "recv_anysource" else arguments[1:3]))


def _receive(state: GroupState, what: str, tensors: Any, source: int | None, tag: int) -> Any:
    tensor = _checked(what, tensors, tag)
    place, settle = place_for(state.group, tensor)
    sender = "any rank" if source is None else f"rank {source}"
    what = f"{what} of {described(tensor)} from {sender}, tag {tag}"
    start = partial(state.part(AnySourceMatching).recv, as_bytes(place), source, tag)
    return _issue_message(state, what, start, tensor, settle)


def _checked(what: str, tensors: Any, tag: int) -> Tensor:
    tensor = one_of(what, tensors)
    require_host(what, tensor)
    try:
        number = operator.index(tag)
    except TypeError:
        raise RefusedError(f"{what}: tag={tag!r}: want an integer from 0 to {_MOST_TAG}") from None
    if number < 0:
        raise RefusedError(f"{what}: Tag must be nonnegative, got {number}")
    if number > _MOST_TAG:
        raise RefusedError(f"{what}: tag={number}: want at most {_MOST_TAG}")
    return tensor


def _issue_message(
    state: GroupState, what: str, start: Callable[[], Handle], tensor: Tensor, settle: Settle = None
) -> Any:
    def started(_waits: bool) -> Handle:  # noqa: FBT001 -- `issue` calls it this way
        return start()

    return state.issue(what, ReadyOperation(started, settle), state.options_of(None), (tensor,), MessageWork)
