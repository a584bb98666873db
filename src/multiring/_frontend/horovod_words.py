"""Decide whether error messages have Horovod's wording in front of multiring's."""

import sys
from pathlib import Path

_PACKAGES = Path(__file__).parents[1] / "horovod"


def speaks_horovod() -> bool:
    """Return whether this program imported multiring's `horovod` (docs/horovod.md)."""
    where: str | None = getattr(sys.modules.get("horovod"), "__file__", None)
    return where is not None and _PACKAGES in Path(where).parents
