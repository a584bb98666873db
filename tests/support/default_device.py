"""Run the tests of host tensors with tensors on stand-in devices: MULTIRING_TEST_DEVICE=cuda.

The tensors that a test creates in a rank are made on the host and moved to the rank's device, so that their values are
the same. What the test hands to NumPy is copied back. multiring and torch themselves get what they ask for.
"""

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from tests.support.cuda_torch_ranks import JobOnDevices, on_device
from tests.support.ranks import Here
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

_OWN = ("tests.", "test_", "torch.nn.")


def _is_of_a_test(depth: int) -> bool:
    """Return whether the function `depth` frames above the caller is a test's, or a module of torch."""
    return str(sys._getframe(depth + 1).f_globals.get("__name__", "")).startswith(_OWN)


class OnDevice(TorchFunctionMode):
    """Moves new tensors of tests to a device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._constructors = {*_device_constructors(), torch.from_numpy}
        super().__init__()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `func`, and move its result."""
        kwargs = kwargs or {}
        if func is torch.sparse_coo_tensor and _is_of_a_test(1):
            indices, values = (torch.as_tensor(each).to(self._device) for each in args[:2])
            args = (indices, values, *args[2:])
        found = func(*args, **kwargs)
        if func not in self._constructors or kwargs.get("device") is not None or not isinstance(found, Tensor):
            return found
        if not _is_of_a_test(1) or not found.is_cpu:
            return found
        return found.detach().to(self._device).requires_grad_(found.requires_grad)


def _copied_back(original: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: Tensor, *arguments: Any, **options: Any) -> Any:
        host = self.detach().cpu() if self.is_cuda and not _is_of_multiring() else self
        return original(host, *arguments, **options)

    return method


def _is_of_multiring() -> bool:
    return str(sys._getframe(2).f_globals.get("__name__", "")).startswith("multiring")


def run(here: Here, module: str, name: str, arguments: tuple[Any, ...]) -> Any:
    """Run a function of a test file on one rank, with its tensors on the rank's device."""
    os.environ.pop("MULTIRING_TEST_DEVICE", None)
    job = JobOnDevices(per_host=here.size, standin={"devices": here.size})
    return on_device(here, __name__, "with_tensors_on_device", job, (module, name, arguments))


def with_tensors_on_device(here: Here, module: str, name: str, arguments: tuple[Any, ...]) -> Any:
    """Run the function under `OnDevice`."""
    function: Any = importlib.import_module(module)
    for each in name.split("."):
        function = getattr(function, each)
    for method in ("numpy", "__array__"):
        setattr(Tensor, method, _copied_back(getattr(Tensor, method)))
    original = torch.from_numpy
    setattr(torch, "from_numpy", lambda array: _moved(original(array)))  # noqa: B010 -- mypy knows its parameter by name
    with OnDevice(torch.device("cuda", torch.cuda.current_device())):
        return function(here, *arguments)


def _moved(tensor: Tensor) -> Tensor:
    return tensor.cuda() if _is_of_a_test(2) else tensor
