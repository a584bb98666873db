"""`multiring lab` with real namespaces: hosts, wires and faults work as promised, and every ending cleans up."""

import contextlib
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from pyroute2 import IPRoute, NetlinkError
from tests.support.lab_rig import ENDINGS, LabRun, command_of, end
from tests.wire.test_launchers import SUM, mpi_job

from multiring._cli import main
from multiring._topology import topology_of
from multiring.errors import ArgumentError, LaunchError, StateError, UnsupportedError
from multiring.lab import Lab, LabPlan, ask_lab, network, parse_fault, running_labs
from multiring.lab.goodput import Flow, goodput
from multiring.lab.host import AGENT, Host
from multiring.lab.pid_namespace import run_in_pid_namespace
from multiring.lab.plan import Rate
from multiring.lab.topology_file import topology_text

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="virtual hosts need root")

MEGABIT = 10**6
LEFT_S = 100.0  # the kernel removes namespaces in the background; labs of concurrent tests have interfaces, too


def run_in(lab: Lab, host: int, *command: str) -> str:
    """Return the output of `command` on a host."""
    with lab.hosts[host].birthplace():
        prepare = lab.hosts[host].preparation(Path("/"))
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=prepare)  # noqa: PLW1509 -- one thread
    return process.communicate(timeout=240)[0]


def fault(lab: Lab, words: str) -> None:
    lab.apply(parse_fault(words.split(), lab.plan))


@pytest.fixture
def start() -> Iterator[Callable[..., LabRun]]:
    started: list[LabRun] = []

    def make(*arguments: str, **variables: str) -> LabRun:
        started.append(LabRun(*arguments, **variables))
        return started[-1]

    yield make
    for lab in started:
        lab.close()


# -- cleanup


@pytest.mark.parametrize("ending", ENDINGS)
def test_nothing_is_left_of_a_lab_that_ended(ending: str) -> None:
    with contextlib.closing(end(ending, delay_s=0.4 if "starts" in ending else 0.0)) as lab:
        assert lab.left_after(LEFT_S) == []


def test_a_frozen_host_ends_with_its_lab(start: Callable[..., LabRun]) -> None:
    lab = start("--hosts", "2", "--at", "0", "freeze host1", "sh", "-c", "echo up; sleep 1000")
    lab.wait_for_lines(1)
    lab.process.terminate()
    assert lab.finish() == 143
    assert lab.left_after(LEFT_S) == []


def test_what_is_left_of_a_lab_is_not_another_lab(start: Callable[..., LabRun]) -> None:
    script = ("--hosts", "2", "sh", "-c", "echo up; sleep 1000")
    over = start(*script)
    over.wait_for_lines(2)
    assert over.namespaces
    over.process.terminate()
    assert over.finish() == 143
    other = start(*script)
    other.wait_for_lines(2)
    assert other.namespaces
    assert over.left_after(LEFT_S) == []


# -- hosts


LOOK = """
import json, os, socket
from pathlib import Path
print(json.dumps({
    "name": socket.gethostname(),
    "address": socket.gethostbyname(socket.gethostname()),
    "interfaces": sorted(name for _, name in socket.if_nameindex()),
    "sys": sorted(os.listdir("/sys/class/net")),
    "shm": os.listdir("/dev/shm"),
    "pids": sorted(int(p.name) for p in Path("/proc").iterdir() if p.name.isdecimal()),
    "ipc": os.readlink("/proc/self/ns/ipc"),
    "folder": os.getcwd(),
    "topology": (lambda path: path and Path(path).read_text())(os.environ.get("MULTIRING_TOPOLOGY")),
    "rank": [os.environ[f"MULTIRING_{n}"] for n in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "RENDEZVOUS")],
}))
Path("/dev/shm/mine").touch()
"""


def test_a_host_has_its_own_of_everything(
    start: Callable[..., LabRun], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    lab = start("--hosts", "3", "--rail", "100mbit", "--log-dir", "logs", sys.executable, "-c", LOOK)
    assert lab.finish() == 0, lab.err
    seen = [json.loads((tmp_path / "logs" / f"rank-{rank}.out").read_text()) for rank in range(3)]
    for host, found in enumerate(seen):
        assert found["name"] == f"host{host}"
        assert found["address"] == f"10.77.0.{host + 1}"
        assert found["interfaces"] == found["sys"] == ["lo", "rail0", "rail1"]
        assert found["shm"] == [Path(AGENT).parent.name]
        assert found["pids"] == [1, 2]
        assert found["folder"] == str(tmp_path)
        assert found["rank"] == [str(host), "3", "0", "1", "host0:29400"]
        assert topology_of(found["topology"]) == topology_of(
            topology_text(LabPlan(hosts=3, rails=(None, 100 * MEGABIT)))
        )
    assert len({found["ipc"] for found in seen} | {str(Path("/proc/self/ns/ipc").readlink())}) == 4
    assert not Path("/dev/shm/mine").exists()  # noqa: S108 -- that it is not there is the point
    assert f"[2] {json.dumps(seen[2])}\n" in lab.out


def test_ranks_are_told_nothing_or_what_the_user_says(start: Callable[..., LabRun], tmp_path: Path) -> None:
    say = ["sh", "-c", "echo told ${MULTIRING_TOPOLOGY-nothing}"]
    lab = start("--hosts", "1", "--no-topology", *say)
    assert (lab.finish(), lab.out) == (0, "[0] told nothing\n")
    lab = start("--hosts", "1", *say, MULTIRING_TOPOLOGY=str(tmp_path))
    assert (lab.finish(), lab.out) == (0, f"[0] told {tmp_path}\n")


def test_eight_hosts_are_up_in_time() -> None:
    begin = time.monotonic()
    with Lab(LabPlan(hosts=8, rails=(1000 * MEGABIT, 250 * MEGABIT), racks=2, uplink=500 * MEGABIT)):
        assert time.monotonic() - begin < 50  # ten times the floor; benchmarks/evidence/lab/main.py measures 0.3 s


def test_labs_do_not_know_each_other(start: Callable[..., LabRun]) -> None:
    names = [f"test-{os.getpid()}-{number}" for number in range(2)]
    labs = [start("--hosts", "2", "--name", name, "sh", "-c", "echo up; sleep 1000") for name in names]
    for lab in labs:
        lab.wait_for_lines(2)
    assert set(names) <= set(running_labs())
    assert not labs[0].namespaces & labs[1].namespaces
    again = start("--hosts", "1", "--name", names[0], "true")
    assert again.finish() == 2
    assert f"a lab cannot be called '{names[0]}': Address already in use; running: " in again.err
    ask_lab(names[0], fault=["kill", "host0"])
    with pytest.raises(StateError, match="cannot freeze host0: it was killed"):
        ask_lab(names[0], fault=["freeze", "host0"])
    ask_lab(names[1], fault=["freeze", "host0"])
    for lab in labs:
        lab.process.terminate()
        assert lab.finish() == 143
    assert not set(names) & set(running_labs())


# -- wires
# The kernel enforces a wire's rate, so tests check only that limit; a benchmark measures how close a busy machine gets.
# Bytes received by a program are no measure: after a lost packet, the rest arrives late and all at once.

BUCKET_BYTES = 80_000  # the bucket sends this much at once, at any rate


def received(lab: Lab, host: int, rail: int = 0) -> int:
    """Return the number of bytes that an interface of a host has received."""
    return int(run_in(lab, host, "cat", f"/sys/class/net/rail{rail}/statistics/rx_bytes"))


@contextmanager
def at_most(lab: Lab, rate: Rate, *ends: tuple[int, int]) -> Iterator[None]:
    """Check that, during the block, interfaces `ends` (host, rail) receive data at no more than `rate` in total."""
    begin, before = time.monotonic(), sum(received(lab, *end) for end in ends)
    yield
    got, taken_s = sum(received(lab, *end) for end in ends) - before, time.monotonic() - begin
    assert 0 < got < 1.02 * (rate / 8 * taken_s + BUCKET_BYTES * len(ends))


def flow(lab: Lab, *flows: Flow) -> list[float]:
    """Return the goodput of each of `flows`, and check that none is zero."""
    found = goodput(lab, flows, seconds=2.0, drain_s=0.5)  # one of two flows may starve for a second
    assert min(found) > 0
    return found


@pytest.mark.parametrize("rate", [20 * MEGABIT, 200 * MEGABIT])
def test_a_link_carries_its_rate_both_ways(rate: Rate) -> None:
    with Lab(LabPlan(hosts=2, rails=(rate,))) as lab, at_most(lab, rate, (0, 0)), at_most(lab, rate, (1, 0)):
        flow(lab, Flow(0, 1), Flow(1, 0))


def test_racks_share_an_uplink_and_rails_do_not_share() -> None:
    plan = LabPlan(hosts=4, rails=(80 * MEGABIT, 20 * MEGABIT), racks=2, uplink=40 * MEGABIT)
    with Lab(plan) as lab:
        with at_most(lab, 80 * MEGABIT, (0, 0)), at_most(lab, 40 * MEGABIT, (2, 0), (3, 0)):
            flow(lab, Flow(1, 0), Flow(0, 2), Flow(1, 3))
        with at_most(lab, 80 * MEGABIT, (1, 0)), at_most(lab, 20 * MEGABIT, (1, 1)):
            flow(lab, Flow(0, 1, 0), Flow(0, 1, 1))


LEAVE = """
from pathlib import Path
Path("/proc/sys/net/ipv4/tcp_wmem").write_text("4096 4608 4608")  # the kernel is full after each payload
import multiring, numpy
group = multiring.init()
group.broadcast(numpy.ones(20_000, numpy.float32), root=0)
if group.rank == 1:
    try:
        group.barrier()
    except multiring.errors.PeerLostError as error:
        print(error)
multiring.shutdown()
"""


def test_a_rank_that_leaves_over_a_slow_wire_is_not_taken_for_dead(start: Callable[..., LabRun]) -> None:
    """If its connection ended before its announcement, operations that do not wait for the rank would fail, too."""
    lab = start("--hosts", "2", "--link", "2mbit", sys.executable, "-c", LEAVE)
    assert lab.finish() == 0, lab.err
    assert "rank 0 left the job" in lab.out


# -- faults

TRY_TO_REACH = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], 9), timeout=2)
except OSError as error:
    sys.stdout.write(type(error).__name__)
"""


def test_links_are_slowed_cut_and_mended() -> None:
    with Lab(LabPlan(hosts=2, rails=(20 * MEGABIT, None))) as lab:
        fault(lab, "slow host1 5mbit")
        for rail in range(2):
            with at_most(lab, 5 * MEGABIT, (0, rail)), at_most(lab, 5 * MEGABIT, (1, rail)):
                flow(lab, Flow(0, 1, rail), Flow(1, 0, rail))
        fault(lab, "cut host1 rail0")
        assert run_in(lab, 1, "cat", "/sys/class/net/rail0/carrier", "/sys/class/net/rail1/carrier") == "0\n1\n"
        assert run_in(lab, 1, sys.executable, "-S", "-c", TRY_TO_REACH, "10.77.0.1") == "TimeoutError"
        assert run_in(lab, 1, sys.executable, "-S", "-c", TRY_TO_REACH, "10.77.1.1") == "ConnectionRefusedError"
        fault(lab, "mend host1")
        with at_most(lab, 20 * MEGABIT, (1, 0)):
            slow, fast = flow(lab, Flow(0, 1, 0), Flow(0, 1, 1))
        assert fast > slow


def test_a_flow_that_dies_is_an_error() -> None:
    with (
        Lab(LabPlan(hosts=2, rails=(1 * MEGABIT,))) as lab,
        pytest.raises(LaunchError, match="nothing arrived from host0"),
    ):
        goodput(lab, [Flow(0, 1)], seconds=0.0, drain_s=0.0)


def test_a_host_is_frozen_thawed_and_killed() -> None:
    with Lab(LabPlan(hosts=2)) as lab:
        host = lab.hosts[1]
        with host.birthplace():
            process = subprocess.Popen(["/bin/sleep", "1000"], preexec_fn=host.preparation(Path("/")))  # noqa: PLW1509 -- one thread
        stat = Path(f"/proc/{process.pid}/stat")
        fault(lab, "freeze host1")
        assert state_within(stat, "T")
        fault(lab, "thaw host1")
        assert state_within(stat, "S")
        fault(lab, "kill host1")
        assert process.wait(240) == -signal.SIGKILL
        for words in ("thaw host1", "slow host1 1mbit", "kill host1"):
            with pytest.raises(StateError, match=f"cannot {words.split()[0]} host1: it was killed"):
                fault(lab, words)


def state_within(stat: Path, wanted: str) -> bool:
    deadline = time.monotonic() + 240
    while stat.read_text().rpartition(")")[2].split()[0] != wanted:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def test_a_keeper_somebody_killed_is_missed() -> None:
    with Lab(LabPlan(hosts=1)) as lab:
        os.kill(lab.hosts[0]._pid, signal.SIGKILL)
        with pytest.raises(StateError, match="host0 is gone: its keeper, process"):
            fault(lab, "freeze host0")


LOOP = """
import sys, time, numpy as np, multiring
group = multiring.init()
array = np.zeros(1000)
sys.stdout.write("up\\n")
sys.stdout.flush()
while True:
    group.all_reduce(array)
    time.sleep(0.01)
"""


def test_every_survivor_of_a_killed_host_tells_of_it(start: Callable[..., LabRun]) -> None:
    name = f"test-{os.getpid()}"
    lab = start("--hosts", "3", "--slots", "2", "--name", name, sys.executable, "-c", LOOP)
    lab.wait_for_lines(6)
    assert main(["lab", "fault", "--lab", name, "kill", "host1"]) == 0
    begin = time.monotonic()
    assert lab.finish() == 1
    assert time.monotonic() - begin < 50
    assert "multiring: lab: kill host1\n" in lab.err
    errors = [line for line in lab.err.splitlines() if "] multiring.errors.PeerLostError" in line]
    assert {line.partition("]")[0] for line in errors} == {"[0", "[1", "[4", "[5"}
    assert any("rank 2" in line or "rank 3" in line for line in errors)


def test_faults_come_by_themselves(start: Callable[..., LabRun]) -> None:
    times = ("--at", "0.4", "kill host0", "--at", "0.2", "slow host1 1mbit", "--at", "0.5", "mend host0")
    lab = start("--hosts", "2", *times, "sh", "-c", "sleep 3")
    assert lab.finish() == 0
    said = [line.removeprefix("multiring: lab: ") for line in lab.err.splitlines()]
    assert said == ["slow host1 1mbit rail0", "kill host0", "cannot mend host0: it was killed"]


def test_a_lab_with_nobody_left_was_killed(start: Callable[..., LabRun]) -> None:
    lab = start("--hosts", "1", "--at", "0.1", "kill host0", "sleep", "1000")
    assert lab.finish() == 137


# -- launchers


def start_a_sum(start: Callable[..., LabRun], folder: Path, launcher: str) -> LabRun:
    """Start a lab whose six ranks each print `ranks 6 ... sum 21.0`."""
    script = folder / "sum.py"
    script.write_text(SUM)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    variables = {"PATH": path}
    name = launcher
    if launcher in ("mpich", "openmpi"):
        prefix, variables = mpi_job(launcher)
        variables = {key: text for key, text in variables.items() if os.environ.get(key) != text}
        variables["PATH"], name = f"{Path(prefix[0]).parent}:{path}", "mpiexec"
    options = ("--hosts", "3", "--slots", "2", "--link", "1gbit", "--launcher", name)
    return start(*options, "--", sys.executable, str(script), **variables)


def assert_summed(lab: LabRun) -> None:
    assert lab.finish() == 0, lab.err
    lines = sorted(line[line.index("ranks") :] for line in lab.out.splitlines() if "ranks" in line)
    assert lines == sorted(f"ranks 6 local {local} 2 sum 21.0" for local in (0, 1) for _ in range(3))
    assert lab.left_after(LEFT_S) == []


@pytest.mark.parametrize("launcher", ["multiring", "torchrun"])
def test_ranks_on_several_hosts_sum_up(start: Callable[..., LabRun], tmp_path: Path, launcher: str) -> None:
    assert_summed(start_a_sum(start, tmp_path, launcher))


@pytest.mark.parametrize("launcher", ["mpich", "openmpi"])
def test_an_mpi_starts_in_two_labs_at_once(start: Callable[..., LabRun], tmp_path: Path, launcher: str) -> None:
    """The hosts of both labs have the same names, and the launcher's daemons the same process numbers."""
    labs = [start_a_sum(start, tmp_path, launcher) for _ in range(2)]
    for lab in labs:
        assert_summed(lab)


@pytest.mark.parametrize(
    ("command", "code", "words"),
    [
        ("ssh host1 'hostname; exit 7'", 7, "[0] host1\n"),
        ("ssh host1 'kill -9 $$'", 137, ""),
        ("ssh host9 true", 255, "no host 'host9' in this lab"),
        ("cd /dev/shm; mkdir gone; cd gone; ssh host1 true", 255, "preexec_fn"),
        ("ssh host1", 255, "want HOST COMMAND"),
        ("sleep 3; ssh host2 true", 255, "host2: no route to host"),
    ],
)
def test_a_host_runs_commands_on_another(start: Callable[..., LabRun], command: str, code: int, words: str) -> None:
    path = f"PATH={Path(AGENT).parent}:$PATH"
    script = f"[ $MULTIRING_RANK = 0 ] || exec sleep 6; {path}; {command}"
    lab = start("--hosts", "3", "--at", "0.1", "kill host2", "sh", "-c", script)
    assert lab.finish() == code, lab.err
    assert words in lab.out + lab.err


def test_a_command_elsewhere_ends_with_who_asked_for_it(start: Callable[..., LabRun]) -> None:
    asks = f"[ $MULTIRING_RANK = 1 ] && exec sleep 1000; {AGENT} host1 'echo up; exec sleep 1003' & wait"
    lab = start("--hosts", "2", "sh", "-c", asks)
    lab.wait_for_lines(1)
    deadline = time.monotonic() + 240
    while not any(command_of(pid) == b"sleep\x001003\x00" for pid in lab.members()):  # "up" is printed before exec
        assert time.monotonic() < deadline
        time.sleep(0.02)
    (agent,) = [pid for pid in lab.members() if b"rsh_agent.py" in command_of(pid)]
    os.kill(agent, signal.SIGKILL)
    deadline = time.monotonic() + 240
    while any(command_of(pid) == b"sleep\x001003\x00" for pid in lab.members()):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_nobody_else_may_speak_to_a_lab(start: Callable[..., LabRun]) -> None:
    name = f"test-{os.getpid()}"
    lab = start("--hosts", "1", "--name", name, "sh", "-c", "echo up; sleep 1000")
    lab.wait_for_lines(1)
    ask = f"""
import os, sys
os.setuid(65534)
from multiring.lab.control_socket import ask_lab
try:
    ask_lab({name!r}, fault=["kill", "host0"])
except Exception as error:
    sys.exit(f"{{type(error).__name__}}: {{error}}")
"""
    # Import before the user changes, because the new user may not be able to read this tree.
    program = "import multiring.lab\n" + ask
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240, check=False)
    assert "LaunchError: lab" in done.stderr
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(f"\0multiring-lab-{name}")
        stranger.sendall(b'["kill"]\n')
        assert b"not understood" in stranger.recv(1000)
    with pytest.raises(StateError, match="unknown fault 'melt'"):
        ask_lab(name, fault=["melt"])


def accept_and_close(listener: socket.socket) -> None:
    listener.accept()[0].close()


@pytest.mark.parametrize(
    ("is_mute", "words"), [(True, "does not answer: timed out"), (False, "did not answer: it ended")]
)
def test_a_lab_that_does_not_answer(monkeypatch: pytest.MonkeyPatch, words: str, *, is_mute: bool) -> None:
    name = f"test-{os.getpid()}-mute"
    monkeypatch.setattr("multiring.lab.control_socket._ANSWER_S", 0.2)
    with socket.socket(socket.AF_UNIX) as listener, ThreadPoolExecutor(1) as threads:
        listener.bind(f"\0multiring-lab-{name}")
        listener.listen()
        if not is_mute:
            threads.submit(accept_and_close, listener)
        with pytest.raises(LaunchError, match=words):
            ask_lab(name, fault=["kill", "host0"])


# -- the process in a pid namespace of its own


def test_what_is_done_apart_ends_as_if_it_was_not(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_in_pid_namespace(lambda: 7) == 7
    assert run_in_pid_namespace(os.getpid) == 1
    with pytest.raises(ArgumentError, match="no host 'x'"):
        run_in_pid_namespace(partial(LabPlan(hosts=1).host_named, "x"))
    assert run_in_pid_namespace(lambda: 1 // 0) == 1
    assert "ZeroDivisionError" in capfd.readouterr().err


# -- missing kernel features


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ("_WIRE", "no virtual interfaces.*CONFIG_VETH"),
        ("_SWITCH", "no bridges.*CONFIG_BRIDGE"),
    ],
)
def test_a_kernel_without_something_is_told_what(monkeypatch: pytest.MonkeyPatch, part: str, words: str) -> None:
    monkeypatch.setattr(network, part, "nonesuch")
    with pytest.raises(UnsupportedError, match=f"this kernel has {words}"), Lab(LabPlan(hosts=1, rails=(5 * MEGABIT,))):
        pass


@pytest.mark.parametrize(
    ("code", "error", "words"),
    [
        (errno.ENOENT, UnsupportedError, r"no token bucket filter \(tbf\), so no rate of 5mbit: .*CONFIG_NET_SCH_TBF"),
        (errno.ENOBUFS, NetlinkError, "full"),
    ],
)
def test_a_kernel_without_token_buckets(
    monkeypatch: pytest.MonkeyPatch, code: int, error: type[Exception], words: str
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise NetlinkError(code, "full")

    monkeypatch.setattr(IPRoute, "tc", refuse, raising=False)  # otherwise __getattr__ finds `tc`
    with pytest.raises(error, match=words), Lab(LabPlan(hosts=1, rails=(5 * MEGABIT,))):
        pass


def test_a_system_that_refuses_a_host_is_told_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("multiring.lab.host._SHARED_MEMORY", Path("/no/such/place"))
    with pytest.raises(
        UnsupportedError, match=r"cannot make host0: No such file or directory \(mount /no/such/place\)"
    ):
        Lab(LabPlan(hosts=1)).__enter__()

    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted", "unshare")

    monkeypatch.setattr("multiring.lab.namespaces.unshare", refuse)
    with pytest.raises(UnsupportedError, match="cannot make a virtual host: Operation not permitted"):
        Host("host0", "")


def test_run_lab_says_what_its_process_may_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted", "unshare")

    monkeypatch.setattr("multiring.lab.namespaces.unshare", refuse)
    assert main(["lab", "--hosts", "1", "true"]) == 2
    assert "cannot make a PID namespace: Operation not permitted" in capsys.readouterr().err
