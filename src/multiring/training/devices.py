"""The device of a run: this rank's GPU, or the host."""

from typing import Any

import numpy as np
import torch

import multiring.torch as mt
from multiring.errors import UnsupportedError

DEVICES = ("auto", "cpu", "cuda")


def device_of(choice: str, *, plain: bool) -> torch.device:
    """Return the device on which this rank trains.

    Args:
        choice: one of DEVICES; "auto" is this rank's GPU where torch sees one, else the host.
        plain: the process is no rank; its GPU is torch's current one.

    Raises:
        UnsupportedError: `choice` is "cuda", and torch sees no GPU with CUDA here.
    """
    if choice == "cpu":
        return torch.device("cpu")
    if plain:
        found = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    else:
        found = mt.local_device()
    if choice == "cuda" and found.type != "cuda":
        raise UnsupportedError(
            f"device='cuda', but torch {torch.__version__} sees no GPU here: want torch's CUDA build, a GPU and its "
            "driver, or device='cpu'"
        )
    return found


def placed(batch: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Return a batch for a model on `device`: on a GPU, the arrays of numbers are tensors there.

    The copies are ordered on the current stream; the host does not wait for them.
    """
    if device.type == "cpu":
        return batch
    return {name: _moved(value, device) for name, value in batch.items()}


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, np.ndarray) and value.dtype.kind in "OUSMmV":  # no numbers
        return value
    if not isinstance(value, np.ndarray | torch.Tensor):
        return value
    host = torch.as_tensor(value)
    return host if host.device == device else host.pin_memory().to(device, non_blocking=True)
