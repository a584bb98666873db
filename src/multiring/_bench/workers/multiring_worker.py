"""Time multiring's own collectives, on arena memory or on ordinary memory."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

import multiring
from multiring._settings import Settings
from multiring._version import VERSION

if TYPE_CHECKING:
    from multiring._bench.workers import contract
else:
    import contract

Array = contract.Array


def call_on(case: contract.Case, group: Any, buffers: list[tuple[Array, Array]]) -> Callable[[int], object]:
    """Return a function that runs the case's operation on the buffer with a given index."""
    wire = contract.given_settings().get("wire")
    coded = {} if wire is None else {"wire": wire}
    calls: dict[str, Callable[[int], object]] = {
        "all_reduce": lambda index: group.all_reduce(buffers[index][0], case.op, **coded),
        "reduce_scatter": lambda index: group.reduce_scatter(*buffers[index], case.op),
        "all_gather": lambda index: group.all_gather(*buffers[index]),
        "broadcast": lambda index: group.broadcast(buffers[index][0], case.root),
        "all_to_all": lambda index: group.all_to_all(*buffers[index]),
        "barrier": lambda _: group.barrier(),
    }
    return calls[case.collective]


def buffers_of(case: contract.Case, group: Any) -> list[tuple[Array, Array]]:
    """Return input and output by index.

    Both are the same memory if the operation works in place.
    """
    dtype = contract.numpy_dtype(case.dtype)

    def make(count: int) -> Array:
        made: Array = group.allocate(count, dtype) if case.buffers == "arena" else np.empty(count, dtype)
        return made

    pairs = []
    for _ in range(contract.num_buffers(case)):
        whole = make(contract.output_count(case, group.size))
        count = contract.input_count(case, group.size)
        if case.collective in {"all_reduce", "broadcast", "barrier"}:
            pairs.append((whole, whole))
        elif case.collective == "all_gather":  # in place: this rank's own part of the result
            pairs.append((whole[group.rank * count : (group.rank + 1) * count], whole))
        else:
            pairs.append((make(count), whole))
    return pairs


def main(case: contract.Case) -> None:
    """Time the case, and write the answer."""
    rank = Settings.from_environment().rank or 0
    contract.pin(case, rank)
    group = multiring.init()
    buffers = buffers_of(case, group)
    call = call_on(case, group, buffers)
    settings = contract.given_settings()
    tolerance = contract.wire_tolerance(settings.get("wire", ""), group.size)
    seconds = contract.verify_and_time(case, (group.rank, group.size), buffers, call, group.barrier, tolerance)
    contract.write_result(case, group.rank, seconds, VERSION, settings)
    multiring.shutdown()


if __name__ == "__main__":
    contract.run_cases(main)
