"""The messages between data peers, after the runtime's handshake. This module has no sockets.

A request is a sealed frame {"pack", "shard", "block"}. Its numbers refer to the manifest that both ends have; it never
contains a path or URL. With "begin" and "end", the request is for a piece of the block. The answer has no bytes if the
server does not keep the block. With "ready", which is 1, the server answers without bytes as soon as it has the block.
An answer is a sealed frame {"bytes", "sha256"}, followed by this number of bytes, or a sealed frame {"error"}.
"""

import hashlib
import re
from dataclasses import dataclass
from typing import Any

from multiring._runtime.bootstrap.handshake import FrameError, Message
from multiring.data.readers.manifest import BLOCK_BYTES

REQUEST_BYTES = 4096
_DIGEST = re.compile("[0-9a-f]{32}", re.ASCII)
_SHA256 = re.compile("[0-9a-f]{64}", re.ASCII)
_MOST = 1 << 40


@dataclass(frozen=True, slots=True)
class BlockRequest:
    """A request for a block of a pack, or for a piece of a block."""

    pack: str
    shard: int
    block: int
    piece: tuple[int, int] | None = None  # the piece's first byte and end, in the block
    waits_only: bool = False  # whether the answer only reports that the server has the block

    def message(self) -> Message:
        """Return the request as a message."""
        told: Message = {"pack": self.pack, "shard": self.shard, "block": self.block}
        if self.waits_only:
            return {**told, "ready": 1}
        return told if self.piece is None else {**told, "begin": self.piece[0], "end": self.piece[1]}


def request_of(message: Message) -> BlockRequest:
    """Return the request in a message.

    Raises:
        FrameError: the message is not a valid request.
    """
    pack = message.get("pack")
    named, pieced, ready = {"pack", "shard", "block"}, {"begin", "end"}, {"ready"}
    if (
        set(message) not in (named, named | pieced, named | ready)
        or not isinstance(pack, str)
        or not _DIGEST.fullmatch(pack)
    ):
        raise FrameError("it sent an invalid request: want a block of a pack")
    piece = (_number(message, "begin"), _number(message, "end")) if pieced <= set(message) else None
    if piece is not None and not piece[0] < piece[1] <= BLOCK_BYTES:
        raise FrameError("it sent an invalid request: want a piece within one block")
    waits_only = "ready" in message
    if waits_only and _number(message, "ready") != 1:
        raise FrameError("it sent an invalid request: its field `ready` is not 1")
    return BlockRequest(pack, _number(message, "shard"), _number(message, "block"), piece, waits_only)


def _number(message: Message, name: str) -> int:
    value: Any = message.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < _MOST:
        raise FrameError(f"it sent an invalid message: its field `{name}` is not an integer of 0 or more")
    return value


def answer(data: bytes) -> Message:
    """Return the message that precedes a block's bytes in an answer."""
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def length_of(message: Message) -> tuple[int, str]:
    """Return the number of bytes that follow an answer, and their SHA-256.

    Raises:
        FrameError: the answer is an error, is invalid, or announces more bytes than a block has.
    """
    if "error" in message:
        raise FrameError(f"it reports: {str(message['error'])[:300]}")
    digest = message.get("sha256")
    size = _number(message, "bytes")
    if size > BLOCK_BYTES or not isinstance(digest, str) or not _SHA256.fullmatch(digest):
        raise FrameError("it sent an invalid answer: want a block")
    return size, digest
