"""NCCL through ctypes: where its library is found, the functions that the nccl engine calls, and their errors.

Several ranks: verified without GPUs only (docs/decisions/0115-nccl-engine.md).
"""

import ctypes
import importlib.util
from collections.abc import Iterator
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_uint, c_void_p
from pathlib import Path
from typing import Any

from multiring.errors import MultiringError, UnsupportedError

LIBRARY = "libnccl.so.2"
OLDEST = 21800  # the first version whose configuration has all fields of NcclConfig
IN_PROGRESS = 7
REMOTE_ERROR = 6
UNIQUE_ID_BYTES = 128
_UNDEFINED = -(2**31)  # NCCL_CONFIG_UNDEF_INT: NCCL chooses
_MAGIC = 0xCAFEBEEF


class UniqueId(ctypes.Structure):
    """ncclUniqueId: the name of a new communicator, which one rank makes and passes to the others."""

    _fields_ = (("internal", ctypes.c_byte * UNIQUE_ID_BYTES),)


class NcclConfig(ctypes.Structure):
    """ncclConfig_t of NCCL 2.18. Later versions add fields at the end, and go by `size` and `version`."""

    _fields_ = (
        ("size", c_size_t),
        ("magic", c_uint),
        ("version", c_uint),
        ("blocking", c_int),
        ("cta_cluster_size", c_int),
        ("fewest_ctas", c_int),
        ("most_ctas", c_int),
        ("net_name", c_char_p),
        ("split_share", c_int),
    )

    @classmethod
    def non_blocking(cls) -> "NcclConfig":
        """Return the configuration of a communicator whose calls never wait for other ranks."""
        rest = (_UNDEFINED, _UNDEFINED, _UNDEFINED, None, _UNDEFINED)
        return cls(ctypes.sizeof(cls), _MAGIC, OLDEST, 0, *rest)


_COLLECTIVE = [c_void_p, c_void_p, c_size_t, c_int]  # input, output, elements, type
_END = [c_void_p, c_void_p]  # communicator, stream
# As CUDA_SIGNATURES.
NCCL_SIGNATURES: dict[str, list[Any]] = {
    "ncclGetVersion": [POINTER(c_int)],
    "ncclGetUniqueId": [POINTER(UniqueId)],
    "ncclCommInitRankConfig": [POINTER(c_void_p), c_int, UniqueId, c_int, POINTER(NcclConfig)],
    "ncclCommAbort": [c_void_p],
    "ncclCommDestroy": [c_void_p],
    "ncclCommGetAsyncError": [c_void_p, POINTER(c_int)],
    "ncclAllReduce": [*_COLLECTIVE, c_int, *_END],
    "ncclReduce": [*_COLLECTIVE, c_int, c_int, *_END],
    "ncclReduceScatter": [*_COLLECTIVE, c_int, *_END],
    "ncclAllGather": [*_COLLECTIVE, *_END],
    "ncclBroadcast": [*_COLLECTIVE, c_int, *_END],
    "ncclSend": [c_void_p, c_size_t, c_int, c_int, *_END],
    "ncclRecv": [c_void_p, c_size_t, c_int, c_int, *_END],
    "ncclGroupStart": [],
    "ncclGroupEnd": [],
}
NCCL_TEXTS: dict[str, list[Any]] = {"ncclGetErrorString": [c_int], "ncclGetLastError": [c_void_p]}  # return a text


class NcclError(MultiringError, RuntimeError):
    """A call of NCCL failed. `code` is its ncclResult_t."""

    def __init__(self, text: str, code: int = 0) -> None:
        super().__init__(text)
        self.code = code


class NcclLibrary:
    """The functions of one NCCL library."""

    def __init__(self, path: str) -> None:
        """Load the library at `path`.

        Raises:
            OSError: it cannot be loaded.
            UnsupportedError: it lacks a function of NCCL, or is too old.
        """
        library = ctypes.CDLL(path)
        self.path = path
        try:
            self._functions = {name: getattr(library, name) for name in (*NCCL_SIGNATURES, *NCCL_TEXTS)}
        except AttributeError as error:
            raise UnsupportedError(f"{path}: {error}; want NCCL {shown_version(OLDEST)} or later") from None
        for name, parameters in (NCCL_SIGNATURES | NCCL_TEXTS).items():
            self._functions[name].argtypes = parameters
        for name in NCCL_TEXTS:
            self._functions[name].restype = c_char_p
        found = c_int()
        self.call("ncclGetVersion", ctypes.byref(found))
        self.version = found.value
        if self.version < OLDEST:
            raise UnsupportedError(
                f"{path} is NCCL {shown_version(self.version)}; want {shown_version(OLDEST)} or later, such as pip "
                "install nvidia-nccl-cu13"
            )

    def call(self, name: str, *arguments: Any, communicator: c_void_p | None = None) -> bool:
        """Call a function; return False if it is still in progress.

        Raises:
            NcclError: NCCL returned an error.
        """
        code = self._functions[name](*arguments)
        if code not in (0, IN_PROGRESS):
            raise self.error_of(name, code, communicator)
        return bool(code == 0)

    def state_of(self, communicator: c_void_p) -> int:
        """Return the asynchronous error of a communicator: 0, IN_PROGRESS, or the code of a failure."""
        found = c_int()
        self.call("ncclCommGetAsyncError", communicator, ctypes.byref(found))
        return found.value

    def error_of(self, name: str, code: int, communicator: c_void_p | None = None) -> NcclError:
        """Return the error of a failed call, with NCCL's last words about it."""
        text = (self._functions["ncclGetErrorString"](code) or b"").decode()
        last = (self._functions["ncclGetLastError"](communicator) or b"").decode().strip()
        return NcclError(f"{name}: {text} ({code})" + (f": {last}" if last else ""), code)


def shown_version(version: int) -> str:
    """Return NCCL's version number as a text, such as "2.28.9"."""
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


def find_nccl() -> NcclLibrary:
    """Load the NCCL of this process: the one that is loaded already, else torch's, a wheel's or the system's.

    A second NCCL in one process would work, but it would take device memory again.

    Raises:
        UnsupportedError: none of them can be used. The text says why for each.
    """
    refused = []
    for path in _places():
        try:
            return NcclLibrary(path)
        except OSError as error:
            refused.append(str(error))
        except UnsupportedError as error:
            refused.append(str(error))
    raise UnsupportedError(
        f"no NCCL {shown_version(OLDEST)} or later: {'; '.join(refused)}; install it, for example with pip install "
        "nvidia-nccl-cu13 (cu12 for a CUDA 12 driver)"
    )


def _places() -> Iterator[str]:
    """Yield the paths at which NCCL may lie, the best first."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    yield from sorted({line.split(maxsplit=5)[5] for line in maps.splitlines() if "/libnccl.so" in line})
    for package, folder in (("torch", "lib"), ("nvidia.nccl", "lib")):
        try:
            spec = importlib.util.find_spec(package)
        except ModuleNotFoundError:  # the parent package is missing
            continue
        for place in spec.submodule_search_locations or () if spec else ():
            yield from (str(path) for path in sorted((Path(place) / folder).glob("libnccl.so*")))
    yield LIBRARY
