"""ChainerMN's binding of NCCL. multiring rejects every use of it."""

from typing import Any

from multiring.errors import UnsupportedError


class NcclRefusedError(UnsupportedError, ValueError):
    """NCCL was requested.

    It is also a ValueError, because ChainerMN raises ValueError if NCCL is missing.
    """


def get_build_version() -> int:
    """Return 0, because multiring does not use NCCL."""
    return 0


def get_version() -> int:
    """Return 0, because multiring does not use NCCL."""
    return 0


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    raise NcclRefusedError(f"nccl.{name}: multiring moves host memory only; use create_communicator()")
