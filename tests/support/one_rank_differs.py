"""Random calls of which one rank makes another one: every rank must get a MismatchError, at once.

`python -m multiring run -n 3 python -m tests.support.one_rank_differs FRAMEWORK SEED CALLS` makes many of them, and
prints those that ended in another way.
"""

import importlib
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from multiring._frontend import array_collectives, array_rows, lifecycle
from multiring._frontend.requests import error_of
from multiring.errors import ArgumentError, MismatchError

TYPES = ("float32", "float16", "int32", "uint8")
INDIVISIBLE = "rows that cannot be divided"


@dataclass(frozen=True, slots=True)
class Array:
    """A key of a tree, or a place in a group, and its array."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    is_sparse: bool = False


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a collective; `is_group` says whether it gets a tree or a list in place of an array."""

    kind: str
    arrays: tuple[Array, ...]
    op: str
    root: int
    name: str | None
    is_group: bool
    compiled: bool


Run = Callable[[Call], Any]


def numpy_call(call: Call) -> Any:
    """Make the call with NumPy's arrays."""
    arrays = [np.ones(each.shape, each.dtype) for each in call.arrays]
    if call.kind == "broadcast":
        return array_collectives.broadcast(arrays[0], call.root, name=call.name)
    options: dict[str, Any] = {} if call.kind in {"allgather", "alltoall"} else {"op": call.op}
    if call.is_group:
        return getattr(array_rows, f"grouped_{call.kind}")(arrays, name=call.name, **options)
    module: Any = array_rows if call.kind in {"alltoall", "reducescatter"} else array_collectives
    return getattr(module, call.kind)(arrays[0], name=call.name, **options)


def torch_call(call: Call) -> Any:
    """Make the call with torch's tensors."""
    torch, mt = importlib.import_module("torch"), importlib.import_module("multiring.torch")
    dense, named = [torch.ones(each.shape, dtype=getattr(torch, each.dtype)) for each in call.arrays], call.name
    tensors = [own.to_sparse() if each.is_sparse else own for own, each in zip(dense, call.arrays, strict=True)]
    if call.kind == "broadcast":
        return mt.broadcast(tensors[0], call.root, name=named)
    options: dict[str, Any] = {} if call.kind in {"allgather", "alltoall"} else {"op": call.op}
    found = getattr(mt, f"grouped_{call.kind}" if call.is_group else call.kind)
    return found(tensors if call.is_group else tensors[0], name=named, **options)


def tensorflow_call(call: Call) -> Any:
    """Make the call with TensorFlow's tensors."""
    tf, mt = importlib.import_module("tensorflow"), importlib.import_module("multiring.tensorflow")

    def run() -> Any:
        tensors = [tf.ones(each.shape, each.dtype) for each in call.arrays]
        if call.kind == "broadcast":
            return mt.broadcast(tensors[0], call.root, name=call.name)
        options: dict[str, Any] = {} if call.kind in {"allgather", "alltoall"} else {"op": call.op}
        if call.kind != "reducescatter" or not call.is_group:  # Horovod's group of them takes no name
            options["name"] = call.name
        found = getattr(mt, f"grouped_{call.kind}" if call.is_group else call.kind)
        return found(tensors if call.is_group else tensors[0], **options)

    return tf.function(run, autograph=False)() if call.compiled else run()


def jax_call(call: Call) -> Any:
    """Make the call with JAX's arrays."""
    jax, mj = importlib.import_module("jax"), importlib.import_module("multiring.jax")
    options: dict[str, Any] = {"name": call.name}
    if call.kind in {"allreduce", "reducescatter"}:
        options["op"] = call.op
    if call.kind == "broadcast":
        options["root_rank"] = call.root

    def run(tree: Any) -> Any:
        return getattr(mj, call.kind)(tree, **options)

    arrays = {each.key: np.ones(each.shape, each.dtype) for each in call.arrays}
    tree = arrays if call.is_group else next(iter(arrays.values()))
    return jax.block_until_ready((jax.jit(run) if call.compiled else run)(tree))


RUNS: dict[str, Run] = {"numpy": numpy_call, "torch": torch_call, "tensorflow": tensorflow_call, "jax": jax_call}


def call_of(dice: random.Random, framework: str, number: int, ranks: int) -> Call:
    """Return a random call that is right if all ranks make it."""
    kind = dice.choice(("allreduce", "broadcast", "allgather", "alltoall", "reducescatter"))
    groups = {"allreduce", "allgather", "reducescatter"} | ({"broadcast", "alltoall"} if framework == "jax" else set())
    is_group = kind in groups and dice.random() < 0.6
    count = dice.randrange(1, 5) if is_group else 1
    share_of_sparse = 0.2 if framework == "torch" and kind == "allreduce" else 0.0
    arrays = tuple(
        Array(
            f"k{place}",
            dice.choice(TYPES),
            (ranks * dice.randrange(1, 3), *dice.choice(((), (2,), (2, 3)))),
            dice.random() < share_of_sparse,
        )
        for place in range(count)
    )
    name = dice.choice((None, f"call{number}"))
    op = dice.choice(("sum", "average"))
    compiled = framework in {"tensorflow", "jax"} and dice.random() < 0.3
    return Call(kind, arrays, op, dice.randrange(ranks), name, is_group, compiled)


def others_of(call: Call, dice: random.Random, framework: str, ranks: int) -> Iterator[tuple[str, Call]]:
    """Yield calls that differ from `call` in one thing, on which the ranks must agree."""
    yield from _with_another_array(call, dice, framework, ranks)
    if call.kind in {"allreduce", "reducescatter"}:
        yield "op", replace(call, op="sum" if call.op == "average" else "average")
    if call.kind == "broadcast":
        yield "root", replace(call, root=(call.root + 1) % ranks)
    if call.is_group:
        yield from _with_another_structure(call, dice, framework, ranks)
    if call.name is None and not (call.compiled and framework == "tensorflow"):
        others = {"allreduce", "broadcast", "allgather"} - {call.kind}
        yield "operation", replace(call, kind=dice.choice(sorted(others)), arrays=call.arrays[:1], is_group=False)


def _with_another_array(call: Call, dice: random.Random, framework: str, ranks: int) -> Iterator[tuple[str, Call]]:
    place = dice.randrange(len(call.arrays))
    own = call.arrays[place]

    def changed(**changes: Any) -> Call:
        return replace(call, arrays=(*call.arrays[:place], replace(own, **changes), *call.arrays[place + 1 :]))

    yield "dtype", changed(dtype=dice.choice([each for each in TYPES if each != own.dtype]))
    yield "more dimensions", changed(shape=(*own.shape, 2))
    if framework == "torch" and call.kind == "allreduce":
        yield "sparse", changed(is_sparse=not own.is_sparse)
    if len(own.shape) > 1:
        yield "last dimension", changed(shape=(*own.shape[:-1], own.shape[-1] + 1))
    if call.kind not in {"allgather", "alltoall"} or framework == "jax":  # elsewhere the rows may differ
        yield "rows", changed(shape=(own.shape[0] + ranks, *own.shape[1:]))
    if call.kind in {"alltoall", "reducescatter"} and not (call.compiled and framework == "tensorflow"):
        yield INDIVISIBLE, changed(shape=(own.shape[0] + 1, *own.shape[1:]))
    if call.is_group and framework == "jax":
        yield "key", changed(key=f"{own.key}a")


def _with_another_structure(call: Call, dice: random.Random, framework: str, ranks: int) -> Iterator[tuple[str, Call]]:
    yield "another array", replace(call, arrays=(*call.arrays, Array("z", dice.choice(TYPES), (ranks, 2))))
    if len(call.arrays) > 1:
        yield "an array less", replace(call, arrays=call.arrays[:-1])
    if framework == "jax":
        yield "no tree", replace(call, arrays=call.arrays[:1], is_group=False)
        if not call.compiled:  # a program without results cannot raise the error on its rank
            yield "an empty tree", replace(call, arrays=())


def outcome_of(run: Run, call: Call) -> str:
    """Make the call; return "MismatchError", or how it ended otherwise."""
    try:
        run(call)
    except Exception as error:  # noqa: BLE001 -- its type depends on the framework
        known = error_of(error) or error
        if isinstance(known, MismatchError):
            return "MismatchError"
        return f"{type(known).__name__}: {known}"
    return "no error"


def wrong_calls(framework: str, seed: int, calls: int) -> list[str]:
    """Make `calls` calls that differ on one rank, and return those that did not end in a MismatchError on this rank.

    After each of them, a call that is the same on all ranks must work. A rank may get an ArgumentError for a call that
    no rank could make.
    """
    run, own, ranks = RUNS[framework], lifecycle.rank(), lifecycle.size()
    dice, found = random.Random(seed), []  # noqa: S311 -- not for cryptography
    for number in range(calls):
        call, odd = call_of(dice, framework, number, ranks), dice.randrange(ranks)
        what, other = dice.choice(list(others_of(call, dice, framework, ranks)))
        outcome = outcome_of(run, other if own == odd else call)
        is_own = own == odd and outcome.startswith((ArgumentError.__name__, "_RowsError"))
        if outcome != "MismatchError" and not (is_own and what == INDIVISIBLE):
            found.append(f"{framework}, seed {seed}, call {number}, {what}, odd rank {odd}: {outcome}: {call}")
        alike = array_collectives.allreduce(np.array([number]), "sum", name=f"after {number}").tolist()
        if alike != [number * ranks]:
            found.append(f"{framework}, seed {seed}, call {number}: afterwards {alike}")
        if any(word in outcome for word in ("StallError", "PeerLostError")):
            break  # the set is of no use any more
    return found


def main(framework: str, seed: int, calls: int) -> None:
    """Make the calls, and print what is wrong."""
    if framework != "numpy":
        importlib.import_module(f"multiring.{framework}").init()
    else:
        lifecycle.init()
    for line in wrong_calls(framework, seed, calls):
        sys.stdout.write(f"rank {lifecycle.rank()}: {line}\n")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
