"""Bad input of a cluster's hosts: each case is a job of two ranks, one on each host.

Usage: `python -m tests.support.cluster_bad_input dask|ray|spark ADDRESS CASE...`. The driver prints a report of each.
"""

import importlib
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support import cluster_programs as programs
from tests.support.cluster_attacks import Run, session
from tests.support.cluster_drivers import report

CLOSED = (23_300, 23_320)  # the ports that the test closes on both hosts


def closed_ports(run: Run) -> Any:
    """Let the ranks meet at ports that a firewall closes."""
    os.environ["MULTIRING_PORTS"] = f"{CLOSED[0]}-{CLOSED[1]}"
    os.environ["MULTIRING_INIT_TIMEOUT_S"] = "8"
    try:
        return run(programs.tell_place)
    finally:
        del os.environ["MULTIRING_PORTS"], os.environ["MULTIRING_INIT_TIMEOUT_S"]


def one_port(run: Run) -> Any:
    """Allow too few ports."""
    os.environ["MULTIRING_PORTS"] = "23330-23330"
    try:
        return run(programs.tell_place)
    finally:
        del os.environ["MULTIRING_PORTS"]


def own_folder(run: Run) -> Any:
    """Call a function of a module that only the driver's host has."""
    folder = Path("/dev/shm/own")  # noqa: S108 -- of this host alone
    folder.mkdir(exist_ok=True)
    (folder / "only_here.py").write_text("def here():\n    return 1\n", encoding="utf-8")
    sys.path.insert(0, str(folder))
    try:
        return run(importlib.import_module("only_here").here)
    finally:
        sys.path.remove(str(folder))


def other_python(run: Run) -> Any:
    """Let the workers of Dask pretend to have another Python, which cannot read the code of this one."""
    from distributed import default_client  # noqa: PLC0415 -- only Dask's driver has it

    client = default_client()
    client.run(pretend, workers=[max(client.nthreads())])
    return run(programs.tell_place)


def pretend() -> None:
    """Make this process pretend to have another Python."""
    sys.version_info = (3, 99, 0, "final", 0)  # type: ignore[assignment]

    def code(*_: Any) -> None:
        raise TypeError("code() argument 13 must be str, not int")

    types.CodeType = code  # type: ignore[assignment,misc]


CASES: dict[str, Callable[[Run], Any]] = {
    # The test has changed the installation of host1, or has undone the change.
    "other version": lambda run: run(programs.tell_place),
    "no multiring": lambda run: run(programs.tell_place),
    "closed ports": closed_ports,
    "one port": one_port,
    "own folder": own_folder,
    "other Python": other_python,
    "again": lambda run: run(programs.tell_place),
}


def main(framework: str, address: str, *cases: str) -> None:
    """Run the driver."""
    with session(framework, address) as run:
        for case in cases:
            report(case, lambda case=case: CASES[case](run))  # type: ignore[misc]


if __name__ == "__main__":
    # Workers import the functions by the module's name.
    from tests.support.cluster_bad_input import main as main_of_module

    main_of_module(*sys.argv[1:])
