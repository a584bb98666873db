"""ChainerMN's binding of NCCL, refused by name."""

from typing import Any

from multiring.errors import UnsupportedError


class NcclRefusedError(UnsupportedError, ValueError):
    """NCCL was asked for; ChainerMN raises a ValueError where a communicator does not have it."""


def get_build_version() -> int:
    """Return 0: NCCL carries nothing."""
    return 0


def get_version() -> int:
    """Return 0: NCCL carries nothing."""
    return 0


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    raise NcclRefusedError(f"nccl.{name}: multiring moves host memory; want a communicator of create_communicator()")
