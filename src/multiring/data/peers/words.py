"""What data peers say to each other, behind the runtime's handshake: one block asked for, one answer. No sockets here.

A request is a sealed frame {"pack", "shard", "block"}: numbers in a manifest that both ends have, never a path or URL.
With "begin" and "end" it is for a piece of the block, which comes without bytes where the other end does not keep it;
with "ready", which is 1, it is answered without bytes once the block is there.
An answer is a sealed frame {"bytes", "sha256"} and that many bytes behind it, or a sealed frame {"error"}.
"""

import hashlib
import re
from dataclasses import dataclass
from typing import Any

from multiring.data.packing.manifest import BLOCK_BYTES
from multiring.runtime.bootstrap.handshake import FrameError, Message

REQUEST_BYTES = 4096
_DIGEST = re.compile("[0-9a-f]{32}", re.ASCII)
_SHA256 = re.compile("[0-9a-f]{64}", re.ASCII)
_MOST = 1 << 40


@dataclass(frozen=True, slots=True)
class Request:
    """A block of a pack, or a piece of one."""

    pack: str
    shard: int
    block: int
    piece: tuple[int, int] | None = None  # its first byte, and the one behind its last
    waits_only: bool = False  # until the block is there, and wants no bytes

    def message(self) -> Message:
        """Return it as a message."""
        told: Message = {"pack": self.pack, "shard": self.shard, "block": self.block}
        if self.waits_only:
            return {**told, "ready": 1}
        return told if self.piece is None else {**told, "begin": self.piece[0], "end": self.piece[1]}


def request_of(message: Message) -> Request:
    """Return the request that a message is.

    Raises:
        FrameError: it is none.
    """
    pack = message.get("pack")
    named, pieced, ready = {"pack", "shard", "block"}, {"begin", "end"}, {"ready"}
    if (
        set(message) not in (named, named | pieced, named | ready)
        or not isinstance(pack, str)
        or not _DIGEST.fullmatch(pack)
    ):
        raise FrameError("it is no request for a block of a pack")
    piece = (_number(message, "begin"), _number(message, "end")) if pieced <= set(message) else None
    if piece is not None and not piece[0] < piece[1] <= BLOCK_BYTES:
        raise FrameError("it is no request for a piece of a block")
    waits_only = "ready" in message
    if waits_only and _number(message, "ready") != 1:
        raise FrameError("its ready is not 1")
    return Request(pack, _number(message, "shard"), _number(message, "block"), piece, waits_only)


def _number(message: Message, name: str) -> int:
    value: Any = message.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < _MOST:
        raise FrameError(f"its {name} is no number of one")
    return value


def answer(data: bytes) -> Message:
    """Return what goes before a block's bytes."""
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def length_of(message: Message) -> tuple[int, str]:
    """Return how many bytes follow an answer, and their SHA-256.

    Raises:
        FrameError: the other end has an error to tell, or more than a block to send.
    """
    if "error" in message:
        raise FrameError(f"it says: {str(message['error'])[:300]}")
    digest = message.get("sha256")
    size = _number(message, "bytes")
    if size > BLOCK_BYTES or not isinstance(digest, str) or not _SHA256.fullmatch(digest):
        raise FrameError("it is no answer with a block")
    return size, digest
