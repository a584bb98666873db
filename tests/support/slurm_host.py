"""Furnish a virtual host for the daemons of Slurm and an ordinary user. A host runs it as root: slurm_host.py FOLDER.

FOLDER/plan.json says what the host's mount namespace gets; see `HostPlan`. Nothing is seen outside the host.
"""

import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from multiring.lab.namespaces import Mount, mount

_ASIDE = Path("/run/aside")
_PRIVATE = ("/run", "/var/log", "/var/spool", "/var/lib/munge")


@dataclass(frozen=True, kw_only=True, slots=True)
class HostPlan:
    """What to mount.

    Args:
        hidden: folders that become empty ones of the host's own.
        shared: what a hidden folder shows instead of an empty one.
        kept: folders that the user must be able to read. They stay where they are, also within hidden ones.
        bound: pairs of a file or folder and the place where the host has it.
        user: number of the user who owns `home`.
        home: a folder of the user.
    """

    hidden: list[str]
    shared: dict[str, str]
    kept: list[str]
    bound: list[tuple[str, str]]
    user: int
    home: str

    def write(self, folder: Path) -> None:
        """Write the plan for `main`."""
        (folder / "plan.json").write_text(json.dumps(asdict(self)), encoding="utf-8")


def is_within(path: Path, folder: Path) -> bool:
    """Return whether `path` is `folder` or in it."""
    return path == folder or folder in path.parents


def main(folder: Path) -> None:
    """Mount what the plan in `folder` says."""
    plan = HostPlan(**json.loads((folder / "plan.json").read_text("utf-8")))
    for place in _PRIVATE:
        mount("tmpfs", place, "tmpfs", Mount.NOSUID | Mount.NODEV, "mode=755")
    kept = [path for path in map(Path, plan.kept) if any(is_within(path, Path(each)) for each in plan.hidden)]
    for number, path in enumerate(kept):
        (_ASIDE / str(number)).mkdir(parents=True)
        mount(str(path), str(_ASIDE / str(number)), flags=Mount.BIND | Mount.REC)
    for each in plan.hidden:
        if each in plan.shared:
            mount(plan.shared[each], each, flags=Mount.BIND)
            continue
        mode = "mode=1777" if each == "/tmp" else "mode=755"  # noqa: S108 -- the host's own
        mount("tmpfs", each, "tmpfs", Mount.NOSUID | Mount.NODEV, mode)
    for number, path in enumerate(kept):
        path.mkdir(parents=True, exist_ok=True)
        mount(str(_ASIDE / str(number)), str(path), flags=Mount.BIND | Mount.REC)
    for source, target in plan.bound:
        if not Path(target).exists():
            Path(target).mkdir(parents=True)
        mount(source, target, flags=Mount.BIND)
    home = Path(plan.home)
    home.mkdir(parents=True, exist_ok=True)
    os.chown(home, plan.user, plan.user)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
