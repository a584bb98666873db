"""A lab before it exists: rates, addresses, faults and commands, as values."""

import ipaddress
import os
import subprocess
import sys
from itertools import product
from typing import Any

import pytest

from multiring._cli import main
from multiring._launch import CommandError
from multiring._topology import TCP, topology_of
from multiring.errors import ArgumentError, LaunchError, UnsupportedError
from multiring.lab import Lab, LabOptions, LabPlan, Launcher, ask_lab, parse_fault, parse_rate, parse_timed, run_lab
from multiring.lab.faults import Fault, FaultType
from multiring.lab.host import AGENT
from multiring.lab.launchers import processes_of
from multiring.lab.network import Network
from multiring.lab.plan import parse_paper_rate, rate_text
from multiring.lab.rsh_agent import host_and_command
from multiring.lab.topology_file import topology_of_lab, topology_text

GIGABIT = 10**9
PLACE = {"job": "j", "secret": "s"}


# -- rates


@pytest.mark.parametrize(
    ("text", "bits_per_s"),
    [
        ("1gbit", GIGABIT),
        ("250mbit", 250_000_000),
        ("2.5Gbit", 2_500_000_000),
        ("64kbit", 64_000),
        ("8000bit", 8000),
        ("34gbit", 34 * GIGABIT),
    ],
)
def test_a_rate_is_bits_a_second(text: str, bits_per_s: int) -> None:
    assert parse_rate(text) == bits_per_s
    assert parse_rate(rate_text(bits_per_s)) == bits_per_s


@pytest.mark.parametrize(
    "text", ["fast", "", "1", "gbit", "-1gbit", "1 gbit", "1gbps", "1MB", "1e9bit", "1gbit/s", "٣mbit"]
)
def test_what_is_no_rate_is_told_so(text: str) -> None:
    with pytest.raises(ArgumentError, match="is not a rate, want a number and bit, kbit, mbit or gbit") as caught:
        parse_rate(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize("text", ["0gbit", "7999bit", "35gbit", "1000gbit"])
def test_a_rate_no_link_can_have(text: str) -> None:
    with pytest.raises(ArgumentError, match=f"'{text}', want 8kbit to 34gbit"):
        parse_rate(text)


def test_a_link_on_paper_may_have_any_rate() -> None:
    assert parse_paper_rate("400gbit") == 400 * GIGABIT
    assert parse_paper_rate("1bit") == 1
    with pytest.raises(ArgumentError, match=r"'0\.5bit', want 1bit or more"):
        parse_paper_rate("0.5bit")
    with pytest.raises(ArgumentError, match="'fast' is not a rate"):
        parse_paper_rate("fast")


# -- plans


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"hosts": 0}, "a lab with 0 hosts: want at least 1"),
        ({"hosts": 2, "slots": 0}, "a lab with 0 slots: want at least 1"),
        ({"hosts": 2, "racks": -1}, "a lab with -1 racks: want at least 1"),
        ({"hosts": 2, "rails": ()}, "a lab with 0 rails: want at least 1"),
        (
            {"hosts": 255, "slots": 3},
            r"255 hosts with 3 slots each are more than .* \(10.77.0.0/24\); want at most 254",
        ),
        ({"hosts": 2, "rails": (None,) * 17}, "17 rails are too many; want at most 16"),
        ({"hosts": 2, "racks": 3}, "3 racks for 2 hosts"),
        ({"hosts": 2, "uplink": GIGABIT}, "an uplink of 1gbit needs several racks, but the lab has only one"),
    ],
)
def test_a_lab_that_cannot_be(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        LabPlan(**wrong)


def test_every_host_has_its_own_address_on_every_rail() -> None:
    plan = LabPlan(hosts=254, rails=(None,) * 16)
    addresses = [plan.address(host, rail) for host, rail in product(range(254), range(16))]
    assert len(set(addresses)) == 254 * 16
    for host, rail in ((0, 0), (253, 15), (7, 3)):
        network = plan.subnet(rail)
        address = ipaddress.IPv4Address(plan.address(host, rail))
        assert address in network
        assert address not in (network.network_address, network.broadcast_address)


def test_names_in_the_hosts_file_lead_to_hosts() -> None:
    plan = LabPlan(hosts=3, rails=(None, None))
    entries = dict(line.split(maxsplit=1) for line in plan.hosts_file().splitlines())
    assert entries.pop("127.0.0.1") == "localhost"
    assert entries["10.77.0.2"] == "host1 host1-rail0"
    assert entries["10.77.1.2"] == "host1-rail1"
    for address, names in entries.items():
        found = {plan.host_named(name) for name in [address, *names.split()]}
        assert found == {int(names.split()[0].partition("-")[0].removeprefix("host"))}
    with pytest.raises(ArgumentError, match="no host 'host3' in this lab; its hosts are host0 to host2"):
        plan.host_named("host3")
    with pytest.raises(ArgumentError, match="no rail 'eth0' in this lab; its rails are rail0, rail1"):
        plan.rail_named("eth0")


@pytest.mark.parametrize(("hosts", "racks"), [(8, 2), (5, 2), (7, 3), (4, 4), (3, 1)])
def test_racks_are_filled_in_order_and_evenly(hosts: int, racks: int) -> None:
    plan = LabPlan(hosts=hosts, racks=racks)
    placed = [plan.rack_of(host) for host in range(hosts)]
    assert placed == sorted(placed)
    filled = [placed.count(rack) for rack in range(racks)]
    assert max(filled) - min(filled) <= 1


# -- faults

TWO_RAILS = LabPlan(hosts=3, rails=(GIGABIT, GIGABIT // 4))


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        ("freeze host0", Fault(kind=FaultType.FREEZE, host=0)),
        ("thaw 10.77.0.2", Fault(kind=FaultType.THAW, host=1)),
        ("kill host2", Fault(kind=FaultType.KILL, host=2)),
        ("cut host1", Fault(kind=FaultType.CUT, host=1, rails=(0, 1))),
        ("cut host1 rail1", Fault(kind=FaultType.CUT, host=1, rails=(1,))),
        ("mend host1 rail0", Fault(kind=FaultType.MEND, host=1, rails=(0,))),
        ("slow host1 10mbit", Fault(kind=FaultType.SLOW, host=1, rails=(0, 1), rate=10**7)),
        ("slow host1 10mbit rail1", Fault(kind=FaultType.SLOW, host=1, rails=(1,), rate=10**7)),
    ],
)
def test_faults_are_read_from_words(words: str, fault: Fault) -> None:
    assert parse_fault(words.split(), TWO_RAILS) == fault


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "unknown fault ''; want one of: freeze HOST; thaw HOST;"),
        ("melt host1", "unknown fault 'melt host1'; want one of"),
        ("kill", "invalid fault 'kill'; want kill HOST"),
        ("kill host1 rail0", "want kill HOST"),
        ("slow host1", r"want slow HOST RATE \[RAIL\]"),
        ("slow host1 rail0", "'rail0' is not a rate"),
        ("cut host1 rail0 rail1", r"want cut HOST \[RAIL\]"),
        ("cut host3", "no host 'host3'"),
        ("cut host1 rail2", "no rail 'rail2'"),
    ],
)
def test_what_is_no_fault_is_told_what_is(words: str, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        parse_fault(words.split(), TWO_RAILS)


def test_a_fault_has_its_time() -> None:
    timed = parse_timed("2.5", "cut host1 rail0", TWO_RAILS)
    assert (timed.at_s, str(timed.fault)) == (2.5, "cut host1 rail0")
    for seconds in ("-1", "soon", "inf", "nan"):
        with pytest.raises(ArgumentError, match=f"cannot happen at '{seconds}': want seconds"):
            parse_timed(seconds, "cut host1", TWO_RAILS)


# -- commands


def test_multiring_starts_ranks_in_the_order_of_hosts() -> None:
    processes = processes_of(LabPlan(hosts=2, slots=2), Launcher.MULTIRING, ["prog", "x"], "", PLACE)
    assert [(p.name, p.host, p.command) for p in processes] == [
        (f"rank {rank}", rank // 2, ("prog", "x")) for rank in range(4)
    ]
    assert dict(processes[3].settings) == {
        "rank": 3,
        "size": 4,
        "local_rank": 1,
        "local_size": 2,
        "rendezvous": "host0:29400",
        "job": "j",
        "secret": "s",
    }


def test_torchrun_starts_once_on_every_host() -> None:
    processes = processes_of(LabPlan(hosts=3, slots=2), Launcher.TORCHRUN, ["python", "x.py"], "", PLACE)
    assert [p.host for p in processes] == [0, 1, 2]
    assert processes[2].command == (
        *(
            "torchrun",
            "--nnodes=3",
            "--node-rank=2",
            "--nproc-per-node=2",
            "--master-addr=host0",
            "--master-port=29500",
        ),
        *("--no-python", "python", "x.py"),
    )
    assert processes[2].settings["rendezvous"] == "host0:29400"
    assert "rank" not in processes[2].settings


@pytest.mark.parametrize(
    ("version", "options"),
    [
        ("HYDRA build details:\n    Version: 5.0.2\n", ("-launcher", "ssh", "-launcher-exec", AGENT, "-hosts")),
        ("mpiexec (Open MPI) 5.0.11\n", ("--host",)),
    ],
)
def test_mpiexec_starts_once_on_the_first_host(version: str, options: tuple[str, ...]) -> None:
    (process,) = processes_of(LabPlan(hosts=2, slots=3), Launcher.MPIEXEC, ["prog"], version, PLACE)
    assert process.host == 0
    assert process.command[: len(options) + 2] == ("mpiexec", *options, "host0:3,host1:3")
    assert process.command[len(options) + 2 : len(options) + 4] == ("-n", "6")
    assert process.command[-1] == "prog"
    assert AGENT in (*process.command, *process.variables.values())
    assert "rendezvous" not in process.settings


def test_another_mpiexec_is_named() -> None:
    with pytest.raises(UnsupportedError, match=r"neither Hydra .* nor Open MPI; --version says 'LAM 7'"):
        processes_of(LabPlan(hosts=2), Launcher.MPIEXEC, ["prog"], "LAM 7\nmore", PLACE)


@pytest.mark.parametrize(
    ("arguments", "host", "command"),
    [
        (["host1", "echo", "a b"], "host1", "echo a b"),
        (["-x", "host1", "true"], "host1", "true"),
        (["-p", "22", "-o", "A=b", "root@host1", "--", "-x"], "host1", "-- -x"),
    ],
)
def test_the_agent_takes_sshs_arguments(arguments: list[str], host: str, command: str) -> None:
    assert host_and_command(arguments) == (host, command)


@pytest.mark.parametrize("arguments", [[], ["host1"], ["-p", "22", "host1"]])
def test_the_agent_wants_a_host_and_a_command(arguments: list[str]) -> None:
    with pytest.raises(ValueError, match="want HOST COMMAND"):
        host_and_command(arguments)


# -- the command line


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--", "true"], "the number of hosts is missing: give it with --hosts H"),
        (["--hosts", "2"], "no command to run"),
        (["--hosts", "300", "true"], "more than there are addresses"),
        (["--hosts", "2", "--link", "quick", "true"], "'quick' is not a rate"),
        (["--hosts", "2", "--rail", "1", "true"], "'1' is not a rate"),
        (["--hosts", "2", "--rack", "2", "--uplink", "x", "true"], "'x' is not a rate"),
        (["--hosts", "2", "--at", "1", "cut host2", "true"], "no host 'host2'"),
        (["--hosts", "2", "--name", "x" * 65, "true"], "a lab cannot be called 'xxx"),
        (["--hosts", "2", "--name", "a b", "true"], "a lab cannot be called 'a b', want 1 to 64 bytes without spaces"),
        (["fault", "--lab", "no such lab", "kill", "host0"], "no lab 'no such lab'; running: "),
    ],
)
def test_wrong_words_are_one_line_and_2(capsys: pytest.CaptureFixture[str], argv: list[str], words: str) -> None:
    assert main(["lab", *argv]) == 2
    err = capsys.readouterr().err
    assert words in err
    assert err.count("\n") == 1


def test_a_missing_command_or_launcher_is_127(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["lab", "--hosts", "2", "no-such-command"]) == 127
    assert "command not found: 'no-such-command'" in capsys.readouterr().err
    monkeypatch.setenv("PATH", "/nowhere")
    for launcher in ("mpiexec", "torchrun"):
        assert main(["lab", "--hosts", "2", "--launcher", launcher, sys.executable]) == 127
        assert f"command not found: '{launcher}' on PATH (/nowhere)" in capsys.readouterr().err


def test_an_mpiexec_that_does_not_say_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(*_: object, **options: Any) -> None:
        raise subprocess.TimeoutExpired("mpiexec", options["timeout"])

    monkeypatch.setattr(subprocess, "run", hang)
    monkeypatch.setattr("multiring.lab.job.check_command", lambda *_: None)
    with pytest.raises(LaunchError, match=r"mpiexec --version fails: .*timed out"):
        run_lab(LabPlan(hosts=1), ["true"], LabOptions(launcher=Launcher.MPIEXEC))


# -- what the ranks learn about the lab


def test_racks_rails_and_rates_are_told() -> None:
    plan = LabPlan(hosts=5, slots=2, rails=(GIGABIT, None), racks=2, uplink=GIGABIT // 2)
    told = topology_of(topology_text(plan))
    assert told.names == ("host0", "host1", "host2", "host3", "host4")
    assert told.interfaces == ("rail0", "rail1")
    assert [rack.hosts for rack in told.racks] == [(0, 1, 2), (3, 4)]
    # 125 MB/s minus the headers of Ethernet and TCP; half of that on the uplinks.
    assert told.rails[0].bandwidth_bytes_per_s == pytest.approx(119.55e6, rel=1e-3)
    assert told.rails[1] == TCP
    for rack in told.racks:
        assert len(rack.uplinks) == 2
        for uplink in rack.uplinks:
            assert uplink is not None
            assert uplink.bandwidth_bytes_per_s == pytest.approx(119.55e6 / 2, rel=1e-3)


def test_one_rack_is_none_and_uplinks_without_limit_narrow_nothing() -> None:
    assert topology_of_lab(LabPlan(hosts=3)).racks == ()
    assert [rack.uplinks for rack in topology_of_lab(LabPlan(hosts=3, racks=3)).racks] == [(), (), ()]


def test_not_root_is_told_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert main(["lab", "--hosts", "2", "true"]) == 2
    assert "needs root, this is user 1000: run it with sudo" in capsys.readouterr().err
    with pytest.raises(UnsupportedError, match="needs root"), Lab(LabPlan(hosts=1)):
        pass


def test_without_pyroute2_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyroute2", None)
    with pytest.raises(LaunchError, match="needs pyroute2: pip install pyroute2"):
        Network(LabPlan(hosts=1), [])


def test_without_a_lab_there_is_nothing_to_break(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("multiring.lab.control_socket.running_labs", list)
    with pytest.raises(ArgumentError, match="no lab is running"):
        ask_lab(None, fault=["kill", "host0"])
    monkeypatch.setattr("multiring.lab.control_socket.running_labs", lambda: ["a", "b"])
    with pytest.raises(ArgumentError, match="several labs are running: name one of a, b"):
        ask_lab(None, fault=["kill", "host0"])


def test_the_exit_code_survives_the_way_between_processes() -> None:
    error = CommandError("not found", 127)
    function, arguments = error.__reduce__()
    again = function(*arguments)
    assert (str(again), again.exit_code) == ("not found", 127)


def test_the_set_of_flags_is_this_one(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["lab", "--help"])
    listed = capsys.readouterr().out.partition("options:")[2]
    flags = [line.split()[0].rstrip(",") for line in listed.splitlines() if line.startswith("  -")]
    assert flags == [
        *("-h", "--hosts", "--slots", "--link", "--rail", "--rack", "--uplink"),
        *("--launcher", "--at", "--no-topology", "--name", "--log-dir"),
    ]
