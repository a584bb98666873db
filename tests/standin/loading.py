"""Load the stand-ins into this process, as if they were NVIDIA's libraries."""

import ctypes
import os
from typing import Any

from tests.standin.build import built
from tests.standin.runtime_signatures import (
    CONTROLS,
    NCCL_CONTROL_TEXTS,
    NCCL_CONTROLS,
    NCCL_MORE,
    RUNTIME_SIGNATURES,
    RUNTIME_TEXTS,
)

from multiring._runtime.engines.nccl_library import NCCL_SIGNATURES, NCCL_TEXTS


def load(*, devices: int = 1, **settings: object) -> None:
    """Load the stand-ins into this process, before anything asks for CUDA.

    `settings` are the stand-ins' own, such as seed=3, delay_us=20000, memory_mb=64, driver=12020 or nccl=21700.
    """
    os.environ["STANDIN_DEVICES"] = str(devices)
    os.environ |= {f"STANDIN_{name.upper()}": str(each) for name, each in settings.items()}
    for name in ("libstandin.so", "libcudart.so.13", "libcuda.so.1", "libnccl.so.2"):
        ctypes.CDLL(str(built() / name), ctypes.RTLD_GLOBAL)


def runtime() -> ctypes.CDLL:
    """Return the stand-in of the CUDA runtime, with the tests' controls."""
    library = ctypes.CDLL(str(built() / "libcudart.so.13"), ctypes.RTLD_GLOBAL)
    return _typed(library, RUNTIME_SIGNATURES | CONTROLS, RUNTIME_TEXTS)


def nccl() -> ctypes.CDLL:
    """Return the stand-in of NCCL, with the tests' controls."""
    library = ctypes.CDLL(str(built() / "libnccl.so.2"), ctypes.RTLD_GLOBAL)
    return _typed(library, NCCL_SIGNATURES | NCCL_MORE | NCCL_CONTROLS, NCCL_TEXTS | NCCL_CONTROL_TEXTS)


def reports() -> list[str]:
    """Return what the stand-in of NCCL reports of this process: calls that NCCL leaves undefined."""
    return list((nccl().standin_nccl_reports() or b"").decode().splitlines())


def _typed(library: ctypes.CDLL, codes: dict[str, list[Any]], texts: dict[str, list[Any]]) -> ctypes.CDLL:
    for name, parameters in (codes | texts).items():
        getattr(library, name).argtypes = parameters
    for name in texts:
        getattr(library, name).restype = ctypes.c_char_p
    return library
