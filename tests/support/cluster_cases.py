"""What every cluster's driver must report, and the reference: the same training under `multiring run` on two hosts."""

import fcntl
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support import other_installs
from tests.support.cluster_attacks import ODD
from tests.support.cluster_bad_input import CLOSED
from tests.support.cluster_drivers import MARK
from tests.support.cluster_hosts import ClusterHosts
from tests.support.page_blocks import BLOCK, ROOT

STEPS = 60
# How many commands start a guide's cluster; the fixtures of the tests run them.
STARTERS = {"guide_ray.md": 2, "guide_dask.md": 3, "guide_spark.md": 3}
LONGEST_S = 800.0  # of all jobs of a session, on a busy machine


def cases_of(output: str) -> dict[str, dict[str, Any]]:
    """Return the driver's reports by case. Repeated cases are numbered."""
    found: dict[str, dict[str, Any]] = {}
    for line in output.splitlines():
        if MARK in line:
            case = json.loads(line[line.index(MARK) + len(MARK) :])
            name = case["case"]
            found[f"{name} {sum(each.startswith(name) for each in found) + 1}" if name in found else name] = case
    return found


def cases_on(
    hosts: ClusterHosts, framework: str, address: str, timeout_s: float = LONGEST_S
) -> dict[str, dict[str, Any]]:
    """Run all jobs of a framework in one session, and return the reports by case. The seconds of each are printed."""
    command = [sys.executable, "-m", "tests.support.cluster_drivers", framework, address]
    code, output = hosts.run(0, *command, timeout_s=timeout_s)
    assert code == 0, output
    found = cases_of(output)
    sys.stdout.write("".join(f"{case['seconds']:7.1f} s {framework}: {name}\n" for name, case in found.items()))
    return found


def attacks_on(hosts: ClusterHosts, framework: str, address: str) -> dict[str, dict[str, Any]]:
    """Run odd programs while another driver's job runs, and kill that driver; return the reports by case.

    Nothing may be left of either driver.
    """
    command = [sys.executable, "-m", "tests.support.cluster_attacks", framework, address]
    folder = hosts.folder / "waiting"
    folder.mkdir()
    log = hosts.start(0, "waiting", *command, str(folder))
    _wait_until(lambda: len(list(folder.glob("at-work-*"))) == 2, lambda: log.read_text(errors="replace"))
    code, output = hosts.run(0, *command, timeout_s=LONGEST_S)
    assert code == 0, output
    found = cases_of(output)
    sys.stdout.write("".join(f"{case['seconds']:7.1f} s {framework}: {name}\n" for name, case in found.items()))
    assert _processes_of_ranks(hosts), "the ranks of the other driver have ended too early"
    code, output = hosts.run(0, "kill", "-9", (folder / "driver").read_text(encoding="ascii"), timeout_s=60)
    assert code == 0, output
    _wait_until(lambda: not _processes_of_ranks(hosts), lambda: "\n".join(_processes_of_ranks(hosts)))
    return found


def bad_input_on(
    hosts: ClusterHosts, framework: str, address: str, renew: Callable[[], None] = lambda: None
) -> dict[str, dict[str, Any]]:
    """Run jobs while host1 has another multiring, none, or closed ports; return the reports by case.

    Args:
        hosts: the hosts with the cluster.
        framework: its name.
        address: where the driver connects.
        renew: lets host1 start new workers, which then import what is there.
    """
    found: dict[str, dict[str, Any]] = {}
    last = ("other Python",) if framework == "dask" else ()
    for script, cases in (
        (other_installs.other_multiring(), ("other version",)),
        (other_installs.no_multiring(), ("no multiring",)),
        (other_installs.closed_ports(*CLOSED), ("closed ports", "one port", "own folder", "again", *last)),
    ):
        for host in (0, 1) if "again" in cases else (1,):
            code, output = hosts.run(host, "/bin/sh", "-c", script, timeout_s=60)
            assert code == 0, output
        renew()
        try:
            command = [sys.executable, "-m", "tests.support.cluster_bad_input", framework, address, *cases]
            code, output = hosts.run(0, *command, timeout_s=LONGEST_S)
        finally:
            for host in (0, 1):
                hosts.run(host, "/bin/sh", "-c", other_installs.undone(), timeout_s=60)
        assert code == 0, output
        found |= cases_of(output)
    if last:
        renew()  # the worker that pretended to have another Python
    return found


def check_attack(cases: dict[str, dict[str, Any]], kind: str) -> None:
    """Check that a rank that ended oddly is named with its reason."""
    case = cases[kind]
    assert case.get("error") == "LaunchError", case
    assert any(text in case["text"] for text in ODD[kind]), case["text"]
    assert case["seconds"] < 150


def check_large_and_nested(cases: dict[str, dict[str, Any]]) -> None:
    """Check the odd programs that return."""
    assert cases["large"].get("result") == [True, True], cases["large"]
    assert cases["nested"].get("result") == [[2.0, [0, 1]], [2.0, [10, 11]]], cases["nested"]
    assert cases["elastic"].get("result") == [[0, 6, 2], [1, 6, 2]], cases["elastic"]


def _processes_of_ranks(hosts: ClusterHosts) -> list[str]:
    """Return the processes of ranks, and those that ranks of the tests leave, on both hosts."""
    signs = ("sleep 43", "multiring._launch", "ray::MultiringRank")
    return [line for host in (0, 1) for line in hosts.processes(host) if any(sign in line for sign in signs)]


def _wait_until(holds: Callable[[], bool], shown: Callable[[], str]) -> None:
    until = time.monotonic() + 240
    while not holds():
        assert time.monotonic() < until, shown()
        time.sleep(0.2)


def reference_losses(factory: pytest.TempPathFactory) -> list[float]:
    """Return the losses of `learn_digits` without any cluster, computed once for all files of a run of the tests."""
    folder = factory.getbasetemp()
    shared = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "reference-losses.json"
    with shared.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not shared.exists():
            shared.write_text(json.dumps(_losses_on_two_hosts(folder)), encoding="ascii")
    losses: list[float] = json.loads(shared.read_text(encoding="ascii"))
    return losses


def _losses_on_two_hosts(folder: Path) -> list[float]:
    """Return the losses of `learn_digits` on two virtual hosts with two ranks each."""
    command = [sys.executable, "-m", "multiring", "lab", "--hosts", "2", "--slots", "2", "--", sys.executable]
    program = ["-m", "tests.support.cluster_programs", str(STEPS)]
    ended = subprocess.run([*command, *program], capture_output=True, text=True, cwd=folder, timeout=600, check=False)
    assert ended.returncode == 0, ended.stderr
    (line,) = [line for line in ended.stdout.splitlines() if "losses" in line]
    losses: list[float] = json.loads(line[line.index("{") :])["losses"]
    return losses


def check_digits(case: dict[str, Any], reference: list[float]) -> None:
    """Check that four ranks on two hosts have learnt the digits, and that their losses are the reference."""
    ranks = case["result"]
    assert [each["rank"] for each in ranks] == [0, 1, 2, 3], case
    assert [each["local"] for each in ranks] == [[0, 2], [1, 2], [0, 2], [1, 2]]
    hosts = [each["host"] for each in ranks]
    assert hosts[0] == hosts[1] != hosts[2] == hosts[3]
    assert ranks[0]["accuracy"] > 0.85
    assert all(each["losses"] == reference for each in ranks)


def check_raised(case: dict[str, Any], rank: int, *, has_cause: bool = True) -> None:
    """Check that the error of `rank` has arrived with its traceback."""
    assert case["error"] == "LaunchError", case
    assert f"rank {rank} raised" in case["text"]
    assert f"ZeroDivisionError: rank {rank} divides" in case["text"]
    assert "cluster_programs.py" in case["text"]
    assert case["cause"] == ("ZeroDivisionError" if has_cause else None)
    assert case["seconds"] < 150


# The case -> the error, and what its text must have, for every framework.
BAD_INPUT = {
    "other version": ("LaunchError", "has multiring 0.0.7"),
    "no multiring": ("LaunchError", "that cannot be imported (ModuleNotFoundError: No module named 'multiring')"),
    "closed ports": ("LaunchError", "a firewall may close this port: MULTIRING_PORTS="),
    "one port": ("LaunchError", "no port of 23330-23330 (MULTIRING_PORTS) is free at 10."),
    "own folder": ("LaunchError", "No module named 'only_here'"),
}


def check_refused(case: dict[str, Any], error: str, text: str) -> None:
    """Check that bad input was refused in bounded time, in words that have `text`."""
    assert case.get("error") == error, case
    assert text in case["text"]
    assert case["seconds"] < 100


def check_guide(hosts: ClusterHosts, page: str, programs: int) -> None:
    """Run each command of a guide that shows an output, and check that it prints exactly these lines, in their order.

    The commands without an output start the cluster, and the fixtures run them.

    Args:
        hosts: the hosts with the cluster.
        page: the guide.
        programs: how many commands the guide has that show an output.
    """
    guide_file(page, hosts.folder)
    shown = [(host, command, lines) for host, command, lines in guide_blocks(page) if lines]
    assert len(shown) == programs
    assert len(guide_blocks(page)) == programs + STARTERS[page]
    for host, command, lines in shown:
        code, output = hosts.run(host, "bash", "-c", command, timeout_s=900)
        assert code == 0, output
        assert [line for line in output.splitlines() if line in lines] == lines, (command, output)


def check_nothing_left(hosts: ClusterHosts) -> None:
    """Check that no process of a rank is left on the hosts."""
    assert _processes_of_ranks(hosts) == []


def guide_commands(page: str) -> list[tuple[int, str]]:
    """Return the commands that a guide shows with a host's prompt: the host's number and the command."""
    return [(host, command) for host, command, _ in guide_blocks(page)]


def guide_blocks(page: str) -> list[tuple[int, str, list[str]]]:
    """Return the commands that a guide shows with a host's prompt: the host's number, the command, and its output."""
    found = []
    for block in BLOCK.finditer((ROOT / "docs" / page).read_text(encoding="utf-8")):
        if block["kind"] == "console":
            commands = re.findall(r"^host(\d)\$ (.*)\n((?:(?!host\d\$).*\n)*)", block["text"], re.MULTILINE)
            found += [(int(host), command, output.splitlines()) for host, command, output in commands]
    return found


def guide_file(page: str, folder: Path) -> None:
    """Write the files that a guide tells the reader to save."""
    for block in BLOCK.finditer((ROOT / "docs" / page).read_text(encoding="utf-8")):
        if block["file"]:
            (folder / block["file"]).write_text(block["text"], encoding="utf-8")
