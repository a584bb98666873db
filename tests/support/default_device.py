"""Run the tests of host tensors with tensors on devices: MULTIRING_TEST_DEVICE=cuda.

The tensors that a test creates in a rank are made on the host and moved to the rank's device, so that their values are
the same. What the test hands to NumPy is copied back. multiring and torch themselves get what they ask for.
"""

import importlib
import os
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from tests.support.cuda_torch_ranks import JobOnDevices, on_device
from tests.support.device_use import COPIED, HELD
from tests.support.ranks import Here
from torch import Tensor
from torch.utils._device import _device_constructors

from multiring.torch.device_staging import DeviceStaging

_OWN = ("tests.", "test_", "examples.", "torch.nn.")
_SCRIPT = "__main__"
Tell = Callable[[str], None]


def _is_of_a_test(depth: int) -> bool:
    """Return whether the function `depth` frames above the caller is a test's, or a module of torch."""
    name = str(sys._getframe(depth + 1).f_globals.get("__name__", ""))
    return name.startswith(_OWN) or name == _SCRIPT


class _Mover:
    """Moves new tensors of tests to a device, and tells of the first."""

    def __init__(self, device: torch.device, tell: Tell) -> None:
        self._device = device
        self._tell = tell

    def moving(self, make: Any) -> Callable[..., Any]:
        """Return the function `make` of torch with its results on the device, if a test calls it without a device."""

        @wraps(make)
        def made(*arguments: Any, **options: Any) -> Any:
            if make.__name__ == "sparse_coo_tensor" and len(arguments) > 1 and _is_of_a_test(1):
                arguments = (*(torch.as_tensor(each).to(self._device) for each in arguments[:2]), *arguments[2:])
            found = make(*arguments, **options)
            if torch.compiler.is_dynamo_compiling() or options.get("device") is not None or not _is_of_a_test(1):
                return found
            return self._moved(found) if isinstance(found, Tensor) and found.is_cpu else found

        return made

    def _moved(self, tensor: Tensor) -> Tensor:
        self._tell(HELD)
        return tensor.detach().to(self._device).requires_grad_(tensor.requires_grad)


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
    job = JobOnDevices(sizes=(here.size,), standin={"devices": here.size})
    return on_device(here, __name__, "with_tensors_on_device", job, (module, name, arguments))


def with_tensors_on_device(here: Here, module: str, name: str, arguments: tuple[Any, ...]) -> Any:
    """Run the function with its tensors on the current device."""
    function: Any = importlib.import_module(module)
    for each in name.split("."):
        function = getattr(function, each)
    put_tensors_on_device(once(here.reach))
    return function(here, *arguments)


def once(tell: Tell) -> Tell:
    """Return a function that tells each fact once."""
    told = set()

    def tell_once(what: str) -> None:
        if what not in told:
            told.add(what)
            tell(what)

    return tell_once


def put_tensors_on_device(tell: Tell) -> None:
    """Let this process make the tensors of tests on the current device, and tell `HELD` and `COPIED`."""
    for method in ("numpy", "__array__"):
        setattr(Tensor, method, _copied_back(getattr(Tensor, method)))
    mover = _Mover(torch.device("cuda", torch.cuda.current_device()), tell)
    # A mode of torch would know only the thread that enters it, and TorchDynamo does not compile under one.
    for make in (*_device_constructors(), torch.from_numpy):
        name = getattr(make, "__name__", "")
        if make is not None and getattr(torch, name, None) is make:
            setattr(torch, name, mover.moving(make))
    for copy in ("all_to_host_behind", "all_to_device"):
        setattr(DeviceStaging, copy, _telling(getattr(DeviceStaging, copy), tell))


def _telling(copy: Callable[..., Any], tell: Tell) -> Callable[..., Any]:
    def method(*arguments: Any, **options: Any) -> Any:
        tell(COPIED)
        return copy(*arguments, **options)

    return method
