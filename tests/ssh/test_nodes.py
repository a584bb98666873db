"""`multiring run --nodes --node-rank --meet` on virtual hosts, without ssh and without a scheduler."""

import signal
import sys

import pytest
from tests.support import other_installs, secret_search
from tests.support.secret_search import secret_shown
from tests.support.ssh_hosts import HOME, RUN, UID, Process, SshHosts

AGAIN = """
import os, sys
import numpy as np, multiring
from pathlib import Path
group = multiring.init()
total = np.ones(1)
group.all_reduce(total)
print(f"rank {group.rank} of {total[0]:g} on {os.uname().nodename}", flush=True)
if group.rank == 2 and "fail" in sys.argv and not Path("been").exists():
    Path("been").touch()
    sys.exit(5)
if "stay" in sys.argv:
    import time
    time.sleep(1000)
"""


def node(hosts: SshHosts, number: int, *words: str, nodes: int = 2, secret: str = "s" * 32) -> Process:
    """Start one node."""
    hosts.write("key", secret, [number])
    hosts.as_root(hosts.lab.hosts[number], f"chmod 600 {HOME}/key")
    place = ["--nodes", str(nodes), "--node-rank", str(number), "--meet", "host0:29400"]
    return hosts.start(number, [*RUN, *place, "-n", "2", *words], MULTIRING_SECRET_FILE=str(HOME / "key"))


def ends(*processes: Process) -> list[tuple[int, str, str]]:
    """Return the exit code and the output of each process."""
    told = [process.communicate(timeout=240) for process in processes]
    return [
        (process.returncode, out.decode(), err.decode()) for process, (out, err) in zip(processes, told, strict=True)
    ]


def test_nodes_are_one_job_with_restarts(hosts: SshHosts) -> None:
    hosts.write("again.py", AGAIN)
    there = node(hosts, 1, "again.py", "fail")
    here = node(hosts, 0, "--max-restarts", "1", "again.py", "fail")
    (code, out, err), (other_code, other_out, other_err) = ends(here, there)
    assert (code, other_code) == (0, 0), err + other_err
    assert sorted(set(out.splitlines())) == [f"[{rank}] rank {rank} of 4 on host0" for rank in (0, 1)]
    assert sorted(other_out.splitlines()) == sorted([f"[{rank}] rank {rank} of 4 on host1" for rank in (2, 3)] * 2)
    for said in (err, other_err):
        assert "on node 1 (host1)) failed: exit code 5" in said
    for number in range(2):
        assert hosts.wait_until_gone(number) == []


def test_a_node_that_never_comes_is_named(hosts: SshHosts) -> None:
    hosts.write("again.py", AGAIN)
    process = node(hosts, 0, "--env", "MULTIRING_INIT_TIMEOUT_S=6", "again.py")
    [(code, _, err)] = ends(process)
    assert code == 2
    assert "multiring: node 1: no answer within 6 s; every node must run the same command" in err


def test_another_secret_is_refused(hosts: SshHosts) -> None:
    hosts.write("again.py", AGAIN)
    there = node(hosts, 1, "again.py", secret="t" * 32)
    here = node(hosts, 0, "--env", "MULTIRING_INIT_TIMEOUT_S=15", "again.py")
    (code, _, err), (other_code, _, other_err) = ends(here, there)
    assert (code, other_code) == (2, 2)
    assert "wrong secret (it says it is node 1)" in err
    assert "the launcher refuses this host: wrong secret; every host must have the same secret" in other_err


def test_another_number_of_nodes_is_refused(hosts: SshHosts) -> None:
    hosts.write("again.py", AGAIN)
    there = node(hosts, 1, "again.py", nodes=3)
    here = node(hosts, 0, "again.py")
    (code, _, err), (other_code, _, _) = ends(here, there)
    assert code == 2
    assert other_code != 0
    assert "node 1 (host1) was started with --nodes 3, and node 0 with --nodes 2: want the same" in err


@pytest.mark.parametrize(
    ("there", "words"),
    [
        (other_installs.other_multiring(), "has multiring 0.0.7 on Python"),
        (other_installs.other_python(), f"on Python {sys.version_info[0]}.{sys.version_info[1]}.99, and this host has"),
    ],
    ids=["other version", "other Python"],
)
def test_another_installation_on_a_node_is_named(hosts: SshHosts, there: str, words: str) -> None:
    hosts.write("again.py", AGAIN)
    hosts.as_root(hosts.lab.hosts[1], there)
    try:
        (code, _, err), (other_code, _, other_err) = ends(node(hosts, 0, "again.py"), node(hosts, 1, "again.py"))
    finally:
        hosts.as_root(hosts.lab.hosts[1], other_installs.undone())
    assert code == 2
    assert other_code != 0
    assert "node 1" in err
    assert words in err, other_err


def test_a_script_that_a_node_does_not_have_is_named_there(hosts: SshHosts) -> None:
    hosts.write("mine.py", AGAIN, [0])
    limit = ("--env", "MULTIRING_INIT_TIMEOUT_S=8")
    (code, _, err), (other_code, _, other_err) = ends(
        node(hosts, 0, *limit, "mine.py"), node(hosts, 1, *limit, "mine.py")
    )
    assert code == 2
    assert "node 1: no answer within 8 s" in err
    assert other_code in (2, 127)
    assert "mine.py" in other_err


def test_a_port_that_a_firewall_closes_is_named_on_both(hosts: SshHosts) -> None:
    hosts.write("again.py", AGAIN)
    hosts.as_root(hosts.lab.hosts[0], other_installs.closed_ports(29400, 29400))
    limit = ("--env", "MULTIRING_INIT_TIMEOUT_S=8")
    try:
        (code, _, err), (other_code, _, other_err) = ends(
            node(hosts, 0, *limit, "again.py"), node(hosts, 1, *limit, "again.py")
        )
    finally:
        hosts.as_root(hosts.lab.hosts[0], other_installs.undone())
    assert (code, other_code) == (2, 2)
    assert "node 1: no answer within 8 s; every node must run the same command" in err
    assert "must reach host0:29400" in err
    assert "host0:29400" in other_err
    assert "timed out" in other_err


def test_a_port_that_is_in_use_is_named(hosts: SshHosts) -> None:
    hosts.write("again.py", AGAIN)
    listener = hosts.start(
        0, ["python3", "-c", "import socket; s = socket.create_server(('', 29400)); print(1, flush=True); input()"]
    )
    assert listener.stdout is not None
    assert listener.stdout.readline() == b"1\n"
    [(code, _, err)] = ends(node(hosts, 0, "again.py"))
    listener.communicate(b"\n", timeout=240)
    assert code == 2
    assert "cannot listen at host0:29400: Address already in use; choose another port" in err


def test_a_killed_node_0_ends_the_others(hosts: SshHosts) -> None:
    hosts.write("again.py", AGAIN)
    there = node(hosts, 1, "again.py", "stay")
    here = node(hosts, 0, "again.py", "stay")
    assert here.stdout is not None
    assert b"of 4" in here.stdout.readline()
    here.send_signal(signal.SIGKILL)
    [(code, _, err)] = ends(there)
    assert code == 1
    assert "the launcher was lost" in err
    for number in range(2):
        assert hosts.wait_until_gone(number) == []


def test_the_secret_is_in_no_command_line_or_environment_or_file_of_others(hosts: SshHosts) -> None:
    given = "the secret that the user gives to the nodes"
    hosts.write("show.py", secret_search.SHOW)
    there = node(hosts, 1, "show.py", "/none", secret=given)
    here = node(hosts, 0, "show.py", "/none", secret=given)
    assert here.stdout is not None
    secrets = (given, secret_shown(here.stdout.readline()))
    key = str(HOME / "key")
    for number in range(2):
        for secret in secrets:  # in environments that only the user can read
            assert hosts.places_of(secret, number, "-", str(UID)) == []
        assert hosts.places_of(given, number, "--left", "-", str(UID)) == [key]  # the search finds what is there
    here.terminate()
    for _, out, err in ends(here, there):
        assert not any(secret in out + err for secret in secrets)
    for number in range(2):
        assert hosts.wait_until_gone(number) == []
        for secret in secrets:
            assert hosts.places_of(secret, number, "--left", "--but", key, "-") == []
