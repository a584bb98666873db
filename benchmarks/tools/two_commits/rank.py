"""Run one rank of a main.py job: verify and time cells one by one.

    python rank.py JOB.json

The cases, checks and clock come from the bench of the checkout that started the job, for both commits. The package
`multiring` is the timed commit's.
"""

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

JOB = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
sys.path.append(JOB["workers"])
sys.path.append(JOB["tasks"])

import multiring  # noqa: E402 -- the timed commit's, from this Python's environment
from multiring._settings import Settings  # noqa: E402

if TYPE_CHECKING:
    from benchmarks.tools.two_commits import tasks

    from multiring._bench.workers import contract, multiring_worker
else:
    import contract
    import multiring_worker
    import tasks

Calls = Callable[[int], object]
Pairs = list[tuple[contract.Array, contract.Array]]
TORCHS = ("named", "grouped")
COLLECTIVES = ("sync", "async", "burst", "adapter", *TORCHS)


def coded_call(group: Any, pairs: Pairs, wire: str) -> Calls:
    """Return a function that reduces a buffer by index, with a wire type."""
    return lambda index: group.all_reduce(pairs[index][0], wire=wire)


def async_call(group: Any, pairs: Pairs) -> Calls:
    """Return a function that starts a sum and waits for it."""
    return lambda index: group.all_reduce_async(pairs[index][0]).wait()


def burst_call(group: Any, pairs: Pairs) -> Calls:
    """Return a function that has the sums of all buffers in flight at once."""

    def call(_: int) -> None:
        for handle in [group.all_reduce_async(array) for array, _ in pairs]:
            handle.wait()

    return call


def torch_call(manner: str, pairs: Pairs) -> Calls:
    """Return a function that sums as a Horovod program does.

    It uses the same name in every step, or all buffers as a group.
    """
    torch, mt = importlib.import_module("torch"), importlib.import_module("multiring.torch")
    tensors = [torch.from_numpy(array) for array, _ in pairs]
    if manner == "grouped":
        return lambda _: mt.grouped_allreduce_(tensors, name="group", op=mt.Sum)
    return lambda index: mt.synchronize(mt.allreduce_async_(tensors[index], name="named", op=mt.Sum))


def call_of(cell: dict[str, Any], case: contract.Case, adapter: Any, group: Any, pairs: Pairs) -> Calls:
    """Return the cell's operation as a function of the buffer's index."""
    if cell["manner"] == "adapter":
        return tasks.adapter_call(JOB["adapter"], adapter, pairs)
    if cell["manner"] in TORCHS:
        return torch_call(cell["manner"], pairs)
    if cell["wire"]:
        return coded_call(group, pairs, cell["wire"])
    makers = {"async": async_call, "burst": burst_call}
    if cell["manner"] in makers:
        return makers[cell["manner"]](group, pairs)
    return multiring_worker.call_on(case, group, pairs)


def time_cell(cell: dict[str, Any], case: contract.Case, adapter: Any, group: Any) -> None:
    """Verify and time one cell, and write the answer file."""
    if cell["manner"] in COLLECTIVES:
        pairs = multiring_worker.buffers_of(case, group)
        call = call_of(cell, case, adapter, group, pairs)
        tolerance = contract.wire_tolerance(cell["wire"], group.size)
        seconds = contract.verify_and_time(case, (group.rank, group.size), pairs, call, group.barrier, tolerance)
    else:
        call, check = tasks.TASKS[cell["manner"]](adapter, group, Path(case.out_dir))
        call(0)
        contract.verify(case, group.rank, *check())
        seconds = contract.time_calls(call, group.barrier, case)
    contract.write_result(case, group.rank, seconds, multiring.__version__, {})


def main() -> None:
    """Run this rank's cells."""
    found = Path(multiring.__file__)
    if not found.is_relative_to(JOB["tree"]):
        raise SystemExit(f"multiring is {found}, want that of {JOB['tree']}: the wrong commit would be timed")
    cases = [contract.Case(**{**cell["case"], "cores": tuple(cell["case"]["cores"])}) for cell in JOB["cells"]]
    contract.pin(cases[0], Settings.from_environment().rank or 0)
    adapter = tasks.joined(JOB["adapter"]) if JOB["adapter"] else None
    group = multiring.world() if adapter else multiring.init()
    if group.rank == 0:
        Path(JOB["joined"]).touch()
    for cell, case in zip(JOB["cells"], cases, strict=True):
        time_cell(cell, case, adapter, group)
    multiring.shutdown()


if __name__ == "__main__":
    main()
