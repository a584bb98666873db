"""The description of a collective as a line of text, which a compiled program contains (native/entry/call.h)."""

import base64
import json
import re
import zlib
from dataclasses import dataclass
from functools import lru_cache

ALL_REDUCE, BROADCAST, ALL_GATHER, ALL_TO_ALL, REDUCE_SCATTER = range(5)  # the numbers in multiring.h
NO_WIRE = "-"
JAX, GROUP = "jax", "group"  # the kinds of calls whose operations have one name with several endings

_SEPARATOR = "|"  # between the wire type and the signature of the call; no wire type contains it
_EQUAL_ROWS, _IN_TURN = "e", "t"
_ENDINGS = r"((?:_\d+of\d+)*)"


@dataclass(frozen=True, slots=True)
class CallSignature:
    """What the ranks compare of a call besides its arrays. Native code passes it on as part of the wire type.

    paths: the path of each array in the call's tree, with the array's type, in the order of the call. Empty for an
        array that is in no tree.
    needs_equal_rows: whether the first dimension of the arrays must be the same on all ranks.
    is_in_turn: whether the program makes the requests of the types one after the other, and none after a failure.
    """

    paths: tuple[str, ...] = ()
    needs_equal_rows: bool = False
    is_in_turn: bool = False

    @property
    def text(self) -> str:
        """The signature in a form without spaces."""
        flags = _EQUAL_ROWS * self.needs_equal_rows + _IN_TURN * self.is_in_turn
        return f"{flags}{_SEPARATOR}{_packed(self.paths)}"


@lru_cache(maxsize=256)  # an eager program asks in each step
def _packed(paths: tuple[str, ...]) -> str:
    return base64.urlsafe_b64encode(zlib.compress(json.dumps(paths).encode())).decode() if paths else ""


def call_text(  # noqa: PLR0913 -- the fields of the line
    collective: int,
    op: int,
    process_set: int,
    name: str,
    *,
    root: int = 0,
    factors: tuple[float, float] = (1.0, 1.0),
    wire: str | None = None,
    signature: CallSignature | None = None,
) -> str:
    """Return the line of text for a collective.

    Args:
        collective: one of the constants above.
        op: Horovod's number of the reduction operation.
        process_set: the number of the process set.
        name: the ranks match the operation by this name. They match operations with the name "" in the order of calls.
        root: the root of a broadcast, a rank of the whole job.
        factors: the factors before and after a reduction.
        wire: the type in which float32 travels between hosts.
        signature: what the ranks compare besides the arrays.
    """
    before, after = factors
    sent = wire or NO_WIRE
    if signature is not None:
        sent += f"{_SEPARATOR}{signature.text}"
    return f"{collective} {op} {root} {process_set} {before!r} {after!r} {sent} {name}"


def wire_and_signature(sent: str) -> tuple[str | None, CallSignature]:
    """Return the wire type and the signature that `call_text` has written as a line's wire type.

    Text of another form is a wire type without a signature.
    """
    wire, _, rest = sent.partition(_SEPARATOR)
    flags, separator, packed = rest.partition(_SEPARATOR)
    if not separator:
        return sent or None, CallSignature()
    try:
        paths = json.loads(zlib.decompress(base64.urlsafe_b64decode(packed))) if packed else []
    except (ValueError, zlib.error):
        return sent, CallSignature()
    return None if wire == NO_WIRE else wire, CallSignature(tuple(paths), _EQUAL_ROWS in flags, _IN_TURN in flags)


def name_of_call(kind: str, name: str) -> str:
    """Return the name for the text of a call that may become several operations; `parsed_name` reads it.

    Native code, or the adapter, appends an ending such as "_2of3" for each operation. Unnamed calls have no name.

    Args:
        kind: JAX or GROUP.
        name: the name of the whole call; "" if it has none.
    """
    return f"{kind} {name} " if name else ""


def parsed_name(sent: str) -> tuple[str, str, str] | None:
    """Return the kind, the name and the ending of an operation of such a call; None for another operation's name.

    The name is "" for an unnamed call of JAX.
    """
    found = re.fullmatch(rf"{JAX}(){_ENDINGS}", sent) or re.fullmatch(
        rf"(?:{JAX}|{GROUP}) (.*) {_ENDINGS}", sent, re.DOTALL
    )
    if found is None:
        return None
    return GROUP if sent.startswith(f"{GROUP} ") else JAX, found[1], found[2]


def known_ending(ending: str) -> str:
    """Return what an ending adds to the name by which the ranks match an operation.

    It is "" for the first operation of each call. So the first operations of all ranks meet, even if the ranks' calls
    have different numbers of operations, and the ranks are told.
    """
    return "" if re.fullmatch(r"(?:_1of\d+)*", ending) else ending


def numbered(place: int, count: int) -> str:
    """Return the ending of the operation at `place`, from 1, of `count` operations; "" if there is only one."""
    return f"_{place}of{count}" if count > 1 else ""
