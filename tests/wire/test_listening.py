"""The tcp engine listens at one address, in the given range of ports, and not at all within one host."""

import socket
from pathlib import Path

import numpy as np
import pytest
from tests.support.free_ports import free_ports
from tests.support.ranks import Here, report_of, run_ranks

from multiring.errors import MultiringError, RendezvousError

LISTEN = "0A"


def listening() -> list[tuple[str, int]]:
    """Return the (address, port) of each listening TCP socket of this process."""
    inodes = {entry.readlink().name for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()}
    found = []
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == LISTEN and f"socket:[{fields[9]}]" in inodes:
            address, port = fields[1].split(":")
            found.append((socket.inet_ntoa(bytes.fromhex(address)[::-1]), int(port, 16)))
    return found


def join_and_look(here: Here) -> list[tuple[str, int]]:
    group = here.join()
    total = np.ones(3)
    group.all_reduce(total)
    assert (total == here.size).all()
    found = listening()
    group.barrier()
    return found


def test_one_host_listens_nowhere() -> None:
    assert run_ranks(join_and_look, 3) == [[], [], []]


def test_ranks_that_met_locally_listen_locally() -> None:
    for found in run_ranks(join_and_look, 3, engine="tcp"):
        ((address, _),) = found
        assert address == "127.0.0.1"


@pytest.mark.parametrize("interface", ["lo", "127.0.0.1", "127.0.0.3"])
def test_interface(interface: str) -> None:
    for found in run_ranks(join_and_look, 2, engine="tcp", interface=interface):
        ((address, _),) = found
        assert address == ("127.0.0.1" if interface == "lo" else interface)


def test_ports() -> None:
    first = free_ports(3)
    last = first + 2
    by_rank = run_ranks(join_and_look, 3, engine="tcp", ports=f"{first}-{last}")
    assert sorted(port for found in by_rank for _, port in found) == list(range(first, last + 1))


def test_too_few_ports() -> None:
    first = free_ports(2)
    last = first + 1
    report = report_of(join_and_look, 3, engine="tcp", ports=f"{first}-{last}", init_timeout_s=60)
    for outcome in report.outcomes:
        assert isinstance(outcome.error, MultiringError), outcome
        assert f"ports {first} to {last}" in str(outcome.error)


def test_no_such_interface() -> None:
    report = report_of(join_and_look, 2, engine="tcp", by_rank=[{}, {"interface": "wan7"}], init_timeout_s=5)
    assert isinstance(report.outcomes[1].error, MultiringError)
    assert "wan7" in str(report.outcomes[1].error)
    assert isinstance(report.outcomes[0].error, RendezvousError)
    assert "rank 1" in str(report.outcomes[0].error)
