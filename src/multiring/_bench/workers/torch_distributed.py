"""Time a backend of torch.distributed through torch: Gloo, or multiring's own.

Ranks meet through a file, so it runs under any launcher that multiring supports.
"""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from multiring._settings import Settings

if TYPE_CHECKING:
    from multiring._bench.workers import contract
else:
    import contract

_OPS = {"sum": "SUM", "min": "MIN", "max": "MAX", "product": "PRODUCT"}
_OPS_OF_OURS = {**_OPS, "average": "AVG"}
SETTINGS = {
    # https://docs.pytorch.org/docs/stable/generated/torch.set_num_threads.html: one thread per rank, for its one core.
    "torch.set_num_threads": "1",
    # https://docs.pytorch.org/docs/stable/distributed.html: ranks only meet through the file.
    "store": "FileStore",
}


def tensor_on(array: contract.Array) -> torch.Tensor:
    """Return a tensor on the memory of `array`; NumPy's bfloat16 is unknown to torch."""
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def memory(case: contract.Case, count: int) -> contract.Array:
    """Return an array of `count` elements, in the backend's own memory if the case asks for that."""
    dtype = contract.numpy_dtype(case.dtype)
    if case.buffers != "arena" or not count:
        return np.empty(count, dtype)
    device = torch.device("cpu")
    group: Any = dist.group.WORLD  # mypy finds no `_get_backend` in its type
    backend = group._get_backend(device)  # noqa: SLF001 -- torch's fully_shard does the same
    tensor: torch.Tensor = backend.allocate_tensor(count * dtype.itemsize, dtype=torch.uint8, device=device)
    whole: contract.Array = tensor.numpy().view(dtype)
    return whole


def call_on(
    case: contract.Case, ops: dict[str, str], pairs: list[tuple[torch.Tensor, torch.Tensor]]
) -> Callable[[int], object]:
    """Return a function that runs the case's operation on the buffer with a given index."""
    op = getattr(dist.ReduceOp, ops.get(case.op, "SUM"))
    # torch 2.13 renamed the two functions that work on one tensor.
    scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    calls: dict[str, Callable[[int], object]] = {
        "all_reduce": lambda index: dist.all_reduce(pairs[index][0], op),
        "reduce_scatter": lambda index: scatter(pairs[index][1], pairs[index][0], op),
        "all_gather": lambda index: gather(pairs[index][1], pairs[index][0]),
        "broadcast": lambda index: dist.broadcast(pairs[index][0], case.root),
        "all_to_all": lambda index: dist.all_to_all_single(pairs[index][1], pairs[index][0]),
        "barrier": lambda _: dist.barrier(),
    }
    return calls[case.collective]


def main(case: contract.Case) -> None:
    """Time the case, and write the answer."""
    settings = Settings.from_environment()
    rank, ranks = settings.rank or 0, settings.size or 1
    contract.pin(case, rank)
    is_ours = case.library == contract.TORCH_OURS
    ops = _OPS_OF_OURS if is_ours else _OPS
    if case.op not in ops:
        contract.refuse(case, rank, f"Gloo has no {case.op}")
    if is_ours:
        importlib.import_module("multiring.torch")  # this import registers the backend, even without an entry point
    torch.set_num_threads(1)
    # Do not use init_method="file://...": torch does not decode %20 in the URL, so the ranks would never meet.
    store = dist.FileStore(str(Path(case.out_dir) / "store"), ranks)  # type: ignore[attr-defined] # torch does
    dist.init_process_group("multiring" if is_ours else "gloo", store=store, rank=rank, world_size=ranks)
    arrays = []
    for _ in range(contract.num_buffers(case)):
        whole = memory(case, contract.output_count(case, ranks))
        in_place = case.collective in {"all_reduce", "broadcast", "barrier"}
        arrays.append((whole if in_place else memory(case, contract.input_count(case, ranks)), whole))
    pairs = [(tensor_on(taken), tensor_on(given)) for taken, given in arrays]
    call = call_on(case, ops, pairs)
    seconds = contract.verify_and_time(case, (rank, ranks), arrays, call, dist.barrier)
    contract.write_result(case, rank, seconds, f"torch {torch.__version__}", SETTINGS | contract.given_settings())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    contract.run_cases(main)
