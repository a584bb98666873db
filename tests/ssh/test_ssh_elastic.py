"""`multiring run --hosts --min-ranks`: ranks and hosts are lost, cut off and frozen, and newcomers replace them."""

import time
from typing import Any

import pytest
from tests.support.elastic_scripts import SUMS, ends_in
from tests.support.ssh_hosts import HOME, RUN, Process, SshHosts

from multiring._launch.live_record import read_record
from multiring.lab import parse_fault


def started(hosts: SshHosts, *words: str, **variables: str) -> Process:
    """Start SUMS with options of `multiring run` and environment variables."""
    hosts.write("train.py", SUMS)
    return hosts.start(0, [*RUN, *words, "train.py"], HOME, **variables)


def wait_for_size(process: Process, size: int) -> None:
    """Wait until a rank has begun to train with so many ranks."""
    assert process.stdout is not None
    for line in process.stdout:
        if f"SIZE {size} ".encode() in line:
            return
    pytest.fail(f"the job ended without {size} ranks: {process.communicate()[1].decode()}")


def ends(hosts: SshHosts, process: Process) -> tuple[list[list[Any]], str]:
    """Let the job end; return what its ranks say, and what the launcher says."""
    hosts.write("stop", "", hosts=[0])
    out, err = process.communicate(timeout=240)
    told = ends_in(out.decode())
    assert process.returncode == 0, err.decode()
    return sorted(told), err.decode()


def wait_until_ended(hosts: SshHosts, number: int, of: str = "python") -> None:
    """Wait until a host has no process of the job. That of sshd does not learn that the wire is cut."""
    until = time.monotonic() + 240
    while any(of in line for line in hosts.processes_of_user(number)):
        assert time.monotonic() < until, hosts.processes_of_user(number)
        time.sleep(0.2)


def logged(hosts: SshHosts, number: int, born: int) -> list[tuple[int, int]]:
    """Return the steps that a rank has committed, each with the number of ranks."""
    pairs = [line.split() for line in hosts.read(number, f"log-{born}").splitlines()]
    return [(int(step), int(size)) for step, size in pairs]


def test_lost_ranks_and_hosts_are_replaced(own_hosts: SshHosts) -> None:
    hosts = own_hosts
    words = ("-n", "4", "--hosts", "host0:2,host1:2,host2:2", "--record", "record")
    process = started(hosts, *words, "--min-ranks", "2", "--max-ranks", "4")
    wait_for_size(process, 4)
    hosts.as_root(hosts.lab.hosts[1], "sleep 2; pkill -9 -n -f train.py$")
    wait_for_size(process, 3)
    wait_for_size(process, 4)  # the newcomer is on host1, which has a free place
    hosts.lab.apply(parse_fault(["kill", "host1"], hosts.lab.plan))
    wait_for_size(process, 2)
    wait_for_size(process, 4)  # the newcomers are on host2
    told, err = ends(hosts, process)
    assert sorted(rank for _, rank, *_ in told) == [0, 1, 2, 3]
    assert all(is_right and sizes in ([2, 3, 4], [2, 4]) for _, _, is_right, sizes in told), (told, err)
    assert "rank 4 is started as a newcomer on host1" in err
    assert "rank 5 is started as a newcomer on host2" in err
    assert "rank 6 is started as a newcomer on host2" in err
    record = read_record(hosts.read(0, "record").encode())
    places = [(each["rank"], each["host"]) for each in record if each["kind"] == "newcomer"]
    assert places == [(4, "host1"), (5, "host2"), (6, "host2")]
    for number in (0, 2):
        assert hosts.wait_until_gone(number) == []


def test_ranks_of_a_dead_host_are_replaced_on_an_unused_one_at_once(own_hosts: SshHosts) -> None:
    """The dead host does not even refuse a connection, so ssh would wait for it for a minute."""
    hosts = own_hosts
    process = started(hosts, *("-n", "2", "--hosts", "host0:1,host1:1,host2:1", "--min-ranks", "1", "--max-ranks", "2"))
    wait_for_size(process, 2)
    time.sleep(1)
    hosts.lab.apply(parse_fault(["kill", "host1"], hosts.lab.plan))
    wait_for_size(process, 1)
    wait_for_size(process, 2)
    told, err = ends(hosts, process)
    assert [(born, is_right) for born, _, is_right, _ in told] == [(0, True), (2, True)], err
    assert "rank 2 is started as a newcomer on host2" in err
    assert "host1 does not come" not in err


@pytest.mark.parametrize(("fault", "mend"), [("cut", "mend"), ("freeze", "thaw")])
def test_of_two_halves_one_goes_on(own_hosts: SshHosts, fault: str, mend: str) -> None:
    hosts = own_hosts
    process = started(hosts, "--hosts", "host0:2,host1:2", "--min-ranks", "1")
    wait_for_size(process, 4)
    time.sleep(1)
    hosts.lab.apply(parse_fault([fault, "host1"], hosts.lab.plan))
    wait_for_size(process, 2)
    if fault == "cut":
        wait_until_ended(hosts, 1)  # the half that is cut off ends by itself
    hosts.lab.apply(parse_fault([mend, "host1"], hosts.lab.plan))
    told, err = ends(hosts, process)
    assert told == [[0, 0, True, [2, 4]], [1, 1, True, [2, 4]]], err
    assert hosts.wait_until_gone(1) == []
    lost_at = max(step for step, size in logged(hosts, 0, 0) if size == 4)
    for born in (2, 3):
        assert all(size == 4 and step <= lost_at for step, size in logged(hosts, 1, born))


def test_a_half_whose_wire_is_joined_again_is_out(own_hosts: SshHosts) -> None:
    """The wire comes back before the agent counts the launcher as lost, so all hear what the others report."""
    hosts = own_hosts
    process = started(hosts, "--hosts", "host0:3,host1:3", "--min-ranks", "1", MULTIRING_WIRE_TIMEOUT_S="4")
    wait_for_size(process, 6)
    time.sleep(1)
    hosts.lab.apply(parse_fault(["cut", "host1"], hosts.lab.plan))
    wait_for_size(process, 3)
    hosts.lab.apply(parse_fault(["mend", "host1"], hosts.lab.plan))
    wait_until_ended(hosts, 1, of="train.py")  # the agent is needed until the end
    told, err = ends(hosts, process)
    assert told == [[rank, rank, True, [3, 6]] for rank in range(3)], err
    assert hosts.wait_until_gone(1) == []


def test_hosts_that_do_not_reach_each_other_part_no_third(own_hosts: SshHosts) -> None:
    hosts = own_hosts
    process = started(
        hosts, "--hosts", "host0:1,host1:1,host2:1", "--min-ranks", "2", MULTIRING_WIRE_TIMEOUT_S="4"
    )  # with fewer than two ranks, the job would end
    wait_for_size(process, 3)
    time.sleep(1)
    for one, other in ((1, 2), (2, 1)):
        address = f"$(getent hosts host{other} | cut -d' ' -f1)"
        hosts.as_root(hosts.lab.hosts[one], f"ip route add blackhole {address}")
    wait_for_size(process, 2)
    told, err = ends(hosts, process)
    assert [(born, rank, is_right, sizes) for born, rank, is_right, sizes in told] == [
        (0, 0, True, [2, 3]), (1, 1, True, [2, 3])
    ], err  # fmt: skip
    assert hosts.wait_until_gone(2) == []


def test_more_ranks_than_places_are_refused(hosts: SshHosts) -> None:
    words = ("--hosts", "host0:1,host1:1", "--min-ranks", "1", "--max-ranks", "3", "train.py")
    done = hosts.launch(*words)
    assert done.returncode == 2
    assert done.stderr == "multiring: --max-ranks 3, but host0:1,host1:1 has places for 2; want more places\n"


def test_hosts_come_and_go_as_a_script_says(own_hosts: SshHosts) -> None:
    hosts = own_hosts
    hosts.write("hosts", "host0:1\nhost1:2\n", hosts=[0])
    words = ("-n", "3", "--host-discovery", "cat hosts", "--min-ranks", "1", "--max-ranks", "5")
    process = started(hosts, *words)
    wait_for_size(process, 3)
    hosts.write("hosts", "host0:1\nhost1:2\nhost2:2\n", hosts=[0])
    wait_for_size(process, 5)
    hosts.write("hosts", "no host at all\n", hosts=[0])
    time.sleep(3)
    hosts.write("hosts", "host0:1\nhost2:2\n", hosts=[0])
    wait_for_size(process, 3)
    wait_until_ended(hosts, 1)  # the agent has ended, too
    told, err = ends(hosts, process)
    assert [(born, is_right) for born, _, is_right, _ in told] == [(0, True), (3, True), (4, True)], err
    assert err.count("it printed 'no host at all', want lines like host:4; its last good answer is kept") == 1
    assert "host1 has 0 places now: ranks 1, 2 are to leave" in err
    assert ") failed: " not in err, err
    assert "rank 5 is started" not in err, err


def test_the_ranks_of_a_host_that_is_asked_to_end_leave(own_hosts: SshHosts) -> None:
    hosts = own_hosts
    process = started(hosts, "-n", "4", "--hosts", "host0:2,host1:2,host2:2", "--min-ranks", "2", "--max-ranks", "4")
    wait_for_size(process, 4)
    time.sleep(1)  # a machine's end asks all its processes, among them the ranks
    hosts.as_root(hosts.lab.hosts[1], "pkill -TERM -f '[h]ost_agent|[t]rain.py$'")
    wait_for_size(process, 2)
    wait_for_size(process, 4)  # the newcomers are on host2, although host1 has places
    told, err = ends(hosts, process)
    assert sorted(rank for _, rank, *_ in told) == [0, 1, 2, 3]
    assert all(is_right for _, _, is_right, _ in told), (told, err)
    assert "host1 got SIGTERM: ranks 2, 3 are to leave" in err
    for rank in (2, 3):
        assert f"rank {rank} has left, because it got SIGTERM" in err
    for rank in (4, 5):
        assert f"rank {rank} is started as a newcomer on host2" in err


def test_the_fewer_ranks_go_on_once_the_launcher_counts_the_other_host_as_lost(own_hosts: SshHosts) -> None:
    hosts = own_hosts
    process = started(hosts, "--hosts", "host0:1,host1:3", "--min-ranks", "1", MULTIRING_WIRE_TIMEOUT_S="9")
    wait_for_size(process, 4)
    time.sleep(1)
    hosts.lab.apply(parse_fault(["cut", "host1"], hosts.lab.plan))
    wait_for_size(process, 1)
    wait_until_ended(hosts, 1)
    hosts.lab.apply(parse_fault(["mend", "host1"], hosts.lab.plan))
    told, err = ends(hosts, process)
    assert told == [[0, 0, True, [1, 4]]], err
    assert "host1 was lost: it has sent nothing for 9 s" in err
