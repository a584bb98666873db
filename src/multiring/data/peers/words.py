"""What data peers say to each other, behind the runtime's handshake: one block asked for, one answer. No sockets here.

A request is a sealed frame {"pack", "shard", "block"}: numbers in a manifest that both ends have, never a path or URL.
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
    """A block of a pack."""

    pack: str
    shard: int
    block: int

    def message(self) -> Message:
        """Return it as a message."""
        return {"pack": self.pack, "shard": self.shard, "block": self.block}


def request_of(message: Message) -> Request:
    """Return the request that a message is.

    Raises:
        FrameError: it is none.
    """
    pack = message.get("pack")
    if set(message) != {"pack", "shard", "block"} or not isinstance(pack, str) or not _DIGEST.fullmatch(pack):
        raise FrameError("it is no request for a block of a pack")
    return Request(pack, _number(message, "shard"), _number(message, "block"))


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
