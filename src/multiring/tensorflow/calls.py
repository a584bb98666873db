"""The calls of collectives in TensorFlow's operations: their texts, their names, and one operation for each type."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from multiring._frontend.process_sets import ProcessSet, numbered_set
from multiring._frontend.reduce_ops import Combination, Sum
from multiring._frontend.requests.text import GROUP, CallSignature, call_text, name_of_call, wire_and_signature
from multiring._runtime.named.signature_text import path_text
from multiring.tensorflow.naming import Naming


def call_of(
    collective: int,
    process_set: ProcessSet,
    name: str,
    how: Combination | None = None,
    *,
    root: int = 0,
    signature: CallSignature | None = None,
) -> str:
    """Return the text of the operation's attribute `call`."""
    op, prescale, postscale, wire = how or Combination(Sum, 1.0, 1.0, None)
    number = process_set.process_set_id or 0
    factors = prescale, postscale
    return call_text(collective, op, number, name, root=root, factors=factors, wire=wire, signature=signature)


class ParsedCall(NamedTuple):
    """What the text of a call says."""

    collective: int
    root: int
    how: Combination
    process_set: ProcessSet


def parsed_call(operation: Any) -> ParsedCall:
    """Return what the attribute `call` of an operation says."""
    words = operation.get_attr("call").decode().split(" ", 7)
    collective, op, root, number = map(int, words[:4])
    wire, _ = wire_and_signature(words[6])
    how = Combination(op, float(words[4]), float(words[5]), wire)
    return ParsedCall(collective, root, how, numbered_set(number))


Run = Callable[[list[Any], str, CallSignature | None], Sequence[Any]]  # (tensors, name, signature) -> results


def by_type(tensors: Sequence[Any], naming: Naming, run: Run, names: Sequence[str] = ()) -> list[Any]:
    """Call `run` once for the tensors of each type, and return all results in order.

    `run` gets the tensors, the name of their operation, and what the ranks compare besides.

    Args:
        tensors: the tensors.
        naming: names the whole call.
        run: adds the operation for tensors of one type.
        names: the names of the tensors, which the ranks compare; their positions by default.
    """
    if len(tensors) == 1 and not names:
        return list(run(list(tensors), naming(tensors[0]), None))
    places: dict[Any, list[int]] = {}
    for place, tensor in enumerate(tensors):
        places.setdefault(tensor.dtype, []).append(place)
    named = zip(names or places_of(tensors), tensors, strict=True)
    paths = [path_text(name, tensor.dtype.name) for name, tensor in named]
    found: dict[int, Any] = {}
    signature = CallSignature(tuple(paths), is_in_turn=tf.executing_eagerly())
    name = name_of_call(GROUP, naming(tensors[0])) if tensors else ""
    for part, those in enumerate(places.values(), 1):
        ending = f"_{part}of{len(places)}" if name and len(places) > 1 else ""
        results = run([tensors[place] for place in those], f"{name}{ending}", signature)
        found |= zip(those, results, strict=True)
    return [found[place] for place in range(len(tensors))]


def places_of(tensors: Sequence[Any]) -> Sequence[str]:
    """Return the names of the tensors of a group that has no names: their places."""
    return [f"[{place}]" for place in range(len(tensors))]
