"""Whose words errors use: multiring's, and Horovod's in front of them in a program that was written for Horovod."""

import sys
from pathlib import Path

_PACKAGES = Path(__file__).parents[1] / "horovod"


def speaks_horovod() -> bool:
    """Return whether this program imported `horovod`, and got multiring for it (docs/horovod.md)."""
    where: str | None = getattr(sys.modules.get("horovod"), "__file__", None)
    return where is not None and _PACKAGES in Path(where).parents
