"""`multiring run --nodes --min-ranks`: nodes are lost, come again, come twice and leave."""

import signal

import pytest
from tests.support.elastic_scripts import SUMS, ends_in
from tests.support.ssh_hosts import HOME, RUN, Process, SshHosts

from multiring.lab import parse_fault

NODES = 3


def started(hosts: SshHosts, number: int, *words: str, program: str = SUMS, **variables: str) -> Process:
    """Start the command of one node, with one rank."""
    hosts.write("train.py", program, [number])
    hosts.write("key", "s" * 32, [number])
    hosts.as_root(hosts.lab.hosts[number], f"chmod 600 {HOME}/key")
    place = ["--nodes", str(NODES), "--node-rank", str(number), "--meet", "host0:29400", "-n", "1"]
    secret = {"MULTIRING_SECRET_FILE": str(HOME / "key")}
    return hosts.start(number, [*RUN, *place, *words, "train.py"], HOME, **secret, **variables)


def all_started(hosts: SshHosts, *words: str, program: str = SUMS, **variables: str) -> list[Process]:
    """Start all nodes, and wait until their ranks have committed a step together."""
    nodes = [started(hosts, number, *words, program=program, **variables) for number in range(NODES)]
    wait_for_size(nodes[0], NODES)
    hosts.as_root(
        hosts.lab.hosts[0], f"for try in $(seq 2000); do [ -s {HOME}/log-0 ] && exit; sleep 0.1; done; exit 1"
    )
    return nodes


def wait_for_size(process: Process, size: int) -> None:
    """Wait until a rank of this node has begun to train with so many ranks."""
    assert process.stdout is not None
    for line in process.stdout:
        if f"SIZE {size} ".encode() in line:
            return
    pytest.fail(f"the job ended without {size} ranks: {process.communicate()[1].decode()}")


def told(process: Process) -> tuple[int, str, str]:
    """Return a node's exit code and output."""
    out, err = process.communicate(timeout=240)
    return process.returncode, out.decode(), err.decode()


def stop(hosts: SshHosts) -> None:
    """Let the ranks end."""
    hosts.write("stop", "", [0])


def test_a_node_is_lost_and_comes_again(own_hosts: SshHosts) -> None:
    hosts = own_hosts
    words = ("--min-ranks", "1", "--max-ranks", "3")
    nodes = all_started(hosts, *words)
    twice = told(started(hosts, 1, *words))
    assert twice[0] == 2
    assert "the launcher refuses this host: node 1 is here already" in twice[2]
    hosts.as_root(hosts.lab.hosts[1], "pkill -9 -f '[m]ultiring|[t]rain.py$'")
    wait_for_size(nodes[0], 2)
    again = started(hosts, 1, *words)
    wait_for_size(nodes[0], 3)
    stop(hosts)
    ends = [told(each) for each in (nodes[0], again, nodes[2])]
    assert [code for code, *_ in ends] == [0, 0, 0], ends
    said = sorted(end for _, out, _ in ends for end in ends_in(out))
    assert [(born, is_right, sizes) for born, _, is_right, sizes in said] == [
        (0, True, [2, 3]), (2, True, [2, 3]), (3, True, [2, 3])
    ], ends  # fmt: skip
    for _, _, err in ends:
        assert "rank 3 is started as a newcomer on node 1 (host1)" in err
    for number in range(NODES):
        assert hosts.wait_until_gone(number) == []


def test_a_node_that_is_asked_to_end_leaves_and_may_come_again(own_hosts: SshHosts) -> None:
    hosts = own_hosts
    words = ("--min-ranks", "1", "--max-ranks", "3")
    nodes = all_started(hosts, *words)
    nodes[2].send_signal(signal.SIGTERM)
    code, _, err = told(nodes[2])
    assert code == 128 + signal.SIGTERM, err
    assert "the ranks of this node have left, as SIGTERM has asked for" in err
    wait_for_size(nodes[0], 2)
    assert hosts.wait_until_gone(2) == []
    nodes[2] = started(hosts, 2, *words)
    wait_for_size(nodes[0], 3)
    stop(hosts)
    ends = [told(each) for each in nodes]
    assert [code for code, *_ in ends] == [0, 0, 0], ends
    assert all(is_right for _, out, _ in ends for _, _, is_right, _ in ends_in(out)), ends
    assert "rank 2 has left, because it got SIGTERM" in ends[0][2]


def test_without_max_ranks_a_node_that_is_cut_off_ends_and_does_not_come_again(own_hosts: SshHosts) -> None:
    hosts = own_hosts
    nodes = all_started(hosts, "--min-ranks", "2", MULTIRING_WIRE_TIMEOUT_S="4")
    hosts.lab.apply(parse_fault(["cut", "host2"], hosts.lab.plan))
    wait_for_size(nodes[0], 2)
    code, _, err = told(nodes[2])
    assert code == 1
    assert "the launcher was lost" in err
    hosts.lab.apply(parse_fault(["mend", "host2"], hosts.lab.plan))
    code, _, err = told(started(hosts, 2, "--min-ranks", "2"))
    assert code == 2
    assert "the job goes on without this node: only --max-ranks lets newcomers in" in err
    stop(hosts)
    ends = [told(each) for each in nodes[:2]]
    assert [code for code, *_ in ends] == [0, 0], ends
    assert sorted(end for _, out, _ in ends for end in ends_in(out)) == [[0, 0, True, [2, 3]], [1, 1, True, [2, 3]]]


def test_too_few_that_are_cut_off_save_their_state(own_hosts: SshHosts) -> None:
    """Their operations wait for ranks of whose end nobody knows, longer than the job gives them to save anything."""
    hosts = own_hosts
    program = SUMS.replace(
        "\ntrain(state)\n",
        "\ntry:\n    train(state)\nexcept multiring.errors.StateError as error:\n"
        "    Path('saved').write_text(f'{0 <= state.step - committed <= 1} {error}')\n    raise SystemExit(3)\n",
    ).replace("import json\n", "import json\nimport multiring\n", 1)
    nodes = all_started(hosts, "--min-ranks", "2", program=program)
    hosts.lab.apply(parse_fault(["cut", "host0"], hosts.lab.plan))
    code, _, err = told(nodes[0])
    assert code == 75, err
    saved = hosts.read(0, "saved")
    assert saved.startswith("True "), (saved, err)
    assert "--min-ranks 2" in saved


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        (["--min-ranks", "4"], "--min-ranks 4 of 3 ranks: want at most 3"),
        (["--min-ranks", "1", "--max-ranks", "2"], "--max-ranks 2 of 3 ranks: want at least 3"),
        (["--min-ranks", "1", "--max-ranks", "4"], "--max-ranks 4, but host0:1,node 1 (host1):1,node 2 (host2):1 has"),
    ],
)
def test_numbers_that_do_not_fit_the_nodes_are_told_on_all(hosts: SshHosts, words: list[str], refusal: str) -> None:
    for code, _, err in [told(each) for each in [started(hosts, number, *words) for number in range(NODES)]]:
        assert code != 0
        assert refusal in err
