"""This rank's device: one GPU for each rank of a host.

`init` selects the GPU as torch's current device, but does not change CUDA_VISIBLE_DEVICES. If each rank sees only one
device, that is its device 0, whatever the rank. Verified without a second GPU only.
"""

import logging
from functools import partial
from typing import Any

import torch

from multiring._frontend import lifecycle
from multiring.errors import UnsupportedError

_log = logging.getLogger("multiring")
_OTHERS = ("xpu", "mps")  # types of devices that torch has and multiring does not serve


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Join the job; see `multiring._frontend.lifecycle.init`.

    If this rank sees several GPUs, the one of `local_device()` becomes torch's current device when the program first
    uses CUDA, unless the program has selected another one by then. Until then, no memory of a GPU is used.
    """
    was_in = lifecycle.is_initialized()
    lifecycle.init(comm, process_sets)
    if not was_in and lifecycle.is_initialized():
        _select()


def local_device() -> torch.device:
    """Return this rank's device: `cuda:N`, or `cpu` if torch sees no GPU.

    N is the rank on this host, modulo the number of GPUs that this process sees.

    Raises:
        ValueError: this process is not in a job.
        UnsupportedError: torch has devices of a kind that multiring does not serve (ROCm, XPU, MPS), and no GPU with
            CUDA.
    """
    rank = lifecycle.local_rank()
    if found := _gpus():
        return torch.device("cuda", rank % found)
    if (kind := _unserved()) is not None:
        raise UnsupportedError(f"this host has devices of the type {kind}: want CUDA, or torch.device('cpu')")
    return torch.device("cpu")


def _gpus() -> int:
    """Return how many GPUs with CUDA this process sees."""
    return 0 if torch.version.hip else torch.cuda.device_count()


def _unserved() -> str | None:
    if torch.version.hip and torch.cuda.device_count():
        return "ROCm"
    modules = {name: getattr(torch, name, None) for name in _OTHERS}
    return next((name.upper() for name, module in modules.items() if module and module.device_count()), None)


def _select() -> None:
    gpus, rank, ranks = _gpus(), lifecycle.local_rank(), lifecycle.local_size()
    if gpus < 2:  # no choice: a rank that sees a single device uses it
        return
    if gpus < ranks and rank == 0:
        _log.warning(
            "%d ranks of this host share %d GPUs; start %d ranks to give each a GPU of its own (several GPUs: verified "
            "without GPUs only)",
            ranks,
            gpus,
            gpus,
        )
    # torch calls the function when it initialises CUDA, or at once if it has done so.
    torch.cuda._lazy_call(partial(_make_current, rank % gpus))  # noqa: SLF001 -- torch has no public function that delays a call


def _make_current(index: int) -> None:
    if torch.cuda.current_device() == 0:  # else the program has selected a device
        torch.cuda.set_device(index)
