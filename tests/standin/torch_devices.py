"""Give the operators of torch's CUDA build arithmetic on the stand-ins, under `.ci/with-cuda`."""

import ctypes
import os
import warnings
from functools import cache
from typing import Any

import torch

# Operators that need no kernel: torch's own do with the runtime's calls.
_OWN = {
    "_local_scalar_dense",
    "_reshape_alias",
    "as_strided",
    "copy_",
    "empty.memory_format",
    "empty_strided",
    "is_set_to",
    "record_stream",
    "resize_",
    "set_",
    "set_.source_Storage",
    "set_.source_Storage_storage_offset",
    "set_.source_Tensor",
    "unfold",
    "view",
    "view_as_complex",
    "view_as_real",
}
# Operators of sparse tensors that need no kernel, and `_coalesce`, which torch_operators.cc has itself.
_OWN_SPARSE = {
    "_coalesce",
    "_coalesced_",
    "_dimI",
    "_dimV",
    "_indices",
    "_nnz",
    "_sparse_coo_tensor_with_dims",
    "_sparse_coo_tensor_with_dims_and_tensors",
    "_values",
    "clone",
    "copy_",
    "copy_sparse_to_sparse_",
    "dense_dim",
    "empty.memory_format",
    "empty_like",
    "indices",
    "is_coalesced",
    "permute",
    "resize_as_sparse_",
    "sparse_dim",
    "sparse_resize_",
    "sparse_resize_and_clear_",
    "unsqueeze",
    "values",
    "view_as_complex",
    "view_as_real",
    "zero_",
}
# Operators that choose a library of NVIDIA by the device.
_MORE = {"convolution", "convolution_backward", "native_layer_norm", "native_layer_norm_backward"}


CYCLES_PER_US = 400  # of torch.cuda._sleep; 1700 on an H100, but a busy host is late


def host_waits() -> int:
    """Return how often this thread has waited for work of a device."""
    return int(ctypes.CDLL(None).standin_thread_waits())


def fail_allocations(after: int, times: int = 2) -> None:
    """Let allocations of device memory or pinned memory fail, after some that do not.

    torch frees the blocks that it keeps and tries again, so it fails if two in a row do.
    """
    ctypes.CDLL(None).standin_fail_allocations(after, times)


def fail_call(code: int, after: int = 0) -> None:
    """Let one call of the runtime or the driver fail, after some that do not. Codes like 700 stay."""
    ctypes.CDLL(None).standin_fail(code, after)


def fail_call_here(code: int, after: int) -> int:
    """Let one call of this thread fail with an error that does not stay, after some that do not; -1: let none fail.

    Return how many calls were left before the failure that was set earlier; -1 if it has come, or none was set.
    """
    return int(ctypes.CDLL(None).standin_fail_here(code, after))


def last_error() -> int:
    """Return the error that a call of this thread has left, which torch's next kernel would report; 0: none."""
    return int(ctypes.CDLL(None).cudaPeekAtLastError())


def _registered(key: str) -> set[str]:
    registered = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    return {each.removeprefix("aten::") for each in registered if each.startswith("aten::")}


def _encoded(names: set[str]) -> Any:
    return (ctypes.c_char_p * len(names))(*sorted(each.encode() for each in names))


@cache
def install() -> None:
    """Install the arithmetic, once in a process. Child processes that are forked before they use CUDA keep it."""
    library = ctypes.CDLL(os.environ["STANDIN_OPERATORS"])
    names = _encoded((_registered("CUDA") - _OWN) | _MORE)
    sparse_names = _encoded(_registered("SparseCUDA") - _OWN_SPARSE)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # each replaced operator
        library.standin_install(names, len(names), sparse_names, len(sparse_names))
    torch.backends.cudnn.enabled = False
    for turn_off in ("enable_flash_sdp", "enable_mem_efficient_sdp", "enable_cudnn_sdp"):
        getattr(torch.backends.cuda, turn_off)(False)
    controls = ctypes.CDLL(None)
    controls.standin_occupy.argtypes = [ctypes.c_void_p, ctypes.c_long]

    def sleep(cycles: int) -> None:
        controls.standin_occupy(torch.cuda.current_stream().cuda_stream, cycles // CYCLES_PER_US)

    cuda: Any = torch.cuda
    cuda._sleep = sleep  # a kernel that no operator launches
