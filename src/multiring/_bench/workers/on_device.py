"""Time all-reduces of CUDA tensors: multiring.torch, and torch.distributed over Gloo and over NCCL, in turns.

All libraries live in the same processes, because starting CUDA takes longer than most measurements. A call is timed
until the result is on the device.
"""

import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

import multiring.torch as mt
from multiring._version import VERSION

if TYPE_CHECKING:
    from multiring._bench.workers import contract
    from multiring._bench.workers.torch_distributed import tensor_on
else:
    import contract
    from torch_distributed import tensor_on

OURS, GLOO, NCCL = "multiring", "gloo", "nccl"
_OPS = {"sum": mt.Sum, "average": mt.Average, "min": mt.Min, "max": mt.Max, "product": mt.Product}
_OPS_OF_TORCH = {"sum": "SUM", "average": "AVG", "min": "MIN", "max": "MAX", "product": "PRODUCT"}
_PROBE_CALLS, _LEAST_CALLS, _MOST_CALLS = 3, 2, 1000

Case = contract.Case


class DeviceLibraries:
    """The libraries on this rank's device."""

    def __init__(self, device: torch.device, nccl: dist.ProcessGroup | None, why_no_nccl: str) -> None:
        self._device = device
        self._nccl = nccl
        self._why_no_nccl = why_no_nccl

    def refusal(self, case: Case) -> str:
        """Return why the case's library cannot run it, or ""."""
        if case.library == GLOO and case.op == "average":
            return "Gloo has no average"
        return self._why_no_nccl if case.library == NCCL else ""

    def version(self, case: Case) -> str:
        """Return the versions of the case's library."""
        if case.library == OURS:
            return f"multiring {VERSION}, torch {torch.__version__}"
        library: Any = torch.cuda.nccl
        more = f", NCCL {'.'.join(map(str, library.version()))}" if case.library == NCCL else ""
        return f"torch {torch.__version__}{more}"

    def call_on(self, case: Case, tensor: Tensor) -> Callable[[int], None]:
        """Return a function that all-reduces `tensor` in place, and returns when the device has the result."""
        if case.library == OURS:
            op = _OPS[case.op]

            def reduce() -> None:
                mt.allreduce_(tensor, name="bench", op=op)

        else:
            group = self._nccl if case.library == NCCL else None
            op_of_torch = getattr(dist.ReduceOp, _OPS_OF_TORCH[case.op])

            def reduce() -> None:
                dist.all_reduce(tensor, op_of_torch, group=group)

        def call(_: int) -> None:
            reduce()
            torch.cuda.synchronize(self._device)

        return call


def verify(case: Case, call: Callable[[int], None], tensor: Tensor) -> None:
    """Exit unless `call` gives the sums of NumPy. Afterwards the tensor has `rest_value`."""
    rank, ranks = mt.rank(), mt.size()
    want = contract.expected(case, rank, ranks)
    tensor.copy_(tensor_on(contract.inputs(case, rank, ranks)))
    call(0)
    bits = torch.int16 if tensor.dtype is torch.bfloat16 else tensor.dtype  # NumPy's bfloat16 is unknown to torch
    contract.verify(case, rank, tensor.view(bits).cpu().numpy().view(want.dtype), want)
    tensor.fill_(contract.rest_value(case))


def calls_for(case: Case, call: Callable[[int], None]) -> int:
    """Return how many calls take about `case.seconds`: on all ranks the same number."""
    if case.calls:
        return case.calls
    probe = statistics.median(contract.time_calls(call, dist.barrier, replace(case, calls=_PROBE_CALLS)))
    slowest = torch.tensor([probe], dtype=torch.float64, device="cpu")
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return min(max(int(case.seconds / max(slowest.item(), 1e-9)), _LEAST_CALLS), _MOST_CALLS)


def time_together(cases: Sequence[Case], libraries: DeviceLibraries, device: torch.device) -> None:
    """Verify and time one size in all libraries, and write their answers."""
    running = []
    for case in cases:
        if reason := libraries.refusal(case):
            contract.offer_nothing(case, mt.rank(), reason)
            continue
        tensor = torch.empty(case.count, dtype=getattr(torch, case.dtype), device=device)
        call = libraries.call_on(case, tensor)
        verify(case, call, tensor)
        running.append((replace(case, calls=calls_for(case, call)), call, list[float]()))
    for turn in range(cases[0].turns):
        # Reverse every other turn, so that no library always runs after the same other library.
        for case, call, seconds in running if turn % 2 == 0 else reversed(running):
            seconds.append(statistics.median(contract.time_calls(call, dist.barrier, case)))
    for case, _, seconds in running:
        contract.write_result(case, mt.rank(), seconds, libraries.version(case), {}, case.calls)


def why_no_nccl(device: torch.device) -> str:
    """Return why torch.distributed cannot use NCCL with one device a rank, or ""."""
    if not dist.is_nccl_available():
        return f"torch {torch.__version__} has no NCCL"
    found: list[Any] = [None] * mt.size()
    dist.all_gather_object(found, str(torch.cuda.get_device_properties(device).uuid))
    gpus = len(set(found))
    if gpus == len(found):
        return ""
    return f"{len(found)} ranks share {gpus} GPU{'s' * (gpus > 1)}, and NCCL wants one each"


def main() -> None:
    """Time all cases of the file, and write the answers."""
    cases = contract.read_cases(Path(sys.argv[1]))
    mt.init()
    device = mt.local_device()
    if device.type == "cpu":
        for case in cases:
            contract.offer_nothing(case, mt.rank(), f"torch {torch.__version__} sees no GPU")
        return
    torch.cuda.set_device(device)
    # Do not use init_method="file://...": torch does not decode %20 in the URL, so the ranks would never meet.
    store = dist.FileStore(str(Path(cases[0].out_dir) / "store"), mt.size())  # type: ignore[attr-defined] # torch does
    dist.init_process_group("gloo", store=store, rank=mt.rank(), world_size=mt.size())
    reason = why_no_nccl(device)
    libraries = DeviceLibraries(device, None if reason else dist.new_group(backend="nccl"), reason)
    for _, together in groupby(cases, key=lambda case: case.size_bytes):
        time_together(list(together), libraries, device)
    dist.barrier()
    dist.destroy_process_group()
    mt.shutdown()


if __name__ == "__main__":
    main()
