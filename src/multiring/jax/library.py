"""Register multiring's handlers of custom calls with JAX.

There is one for programs on CPUs, and one for programs on CUDA devices, which copies through pinned host memory. They
are registered once, and connected to this process's request entry.
"""

import ctypes
import os
from functools import cache
from pathlib import Path

import jax

from multiring._frontend.requests import entry_address
from multiring.errors import UnsupportedError

TARGET = "multiring"
ATTRIBUTE = "call"
_FILE = "_jax.so"


def target() -> str:
    """Register the handlers if needed, and return the name by which programs call it.

    Raises:
        UnsupportedError: multiring was built without the handler, or this JAX cannot use it.
    """
    _use(os.getpid())
    return TARGET


@cache
def _use(_pid: int) -> None:
    """Connect the handler to the request entry of this process. A fork that becomes a rank has its own entry."""
    use = _library().multiring_jax_use
    use.restype, use.argtypes = ctypes.c_char_p, (ctypes.c_void_p,)
    problem = use(entry_address()).decode()
    if problem:
        raise UnsupportedError(f"JAX {jax.__version__}: {problem}")


@cache
def _library() -> ctypes.CDLL:
    path = Path(__file__).parents[1] / "_native" / _FILE
    if not path.exists():
        raise UnsupportedError(f"{path} is missing: multiring was built without its handler for JAX")
    library = ctypes.CDLL(str(path))
    capsule = ctypes.pythonapi.PyCapsule_New
    capsule.restype, capsule.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    for platform, handler in (("cpu", library.multiring_jax_handler), ("CUDA", library.multiring_jax_cuda_handler)):
        address = ctypes.cast(handler, ctypes.c_void_p)
        jax.ffi.register_ffi_target(TARGET, capsule(address, None, None), platform=platform)
    return library
