"""The agents of a job on several hosts, all on this host: what travels to them, and which processes they end."""

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from tests.support.free_ports import free_port

from multiring._launch import control_link, control_tcp
from multiring._launch.agent_process import AgentProcess
from multiring._launch.control_link import (
    AGENT_BEGINS,
    QUIET_S,
    STDOUT,
    ControlLink,
    StreamData,
    secret_of_start,
    silence_of,
)
from multiring._launch.control_tcp import ControlListener, connect
from multiring._launch.host_sessions import HostSession, HostSessions, open_step, ssh_words
from multiring._launch.hosts import task_of
from multiring._launch.hosts_job import HostsJob
from multiring._launch.hosts_loop import SignalCounts, ToldLines
from multiring._launch.job import JobOptions
from multiring._launch.job_process import JobProcess
from multiring._launch.nodes import _secret_of
from multiring._launch.own_modules import module_command
from multiring._runtime.bootstrap.addresses import TcpAddress
from multiring._settings import Settings
from multiring.errors import LaunchError

RUN = (sys.executable, "-m", "multiring", "run")
SHOW = "import os; print(os.environ['MULTIRING_JOB'], os.environ['MULTIRING_SECRET'], flush=True)"


def started(*words: str, **variables: str) -> "subprocess.Popen[str]":
    """Start multiring run."""
    environment = os.environ | variables
    return subprocess.Popen([*RUN, *words], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def told(process: "subprocess.Popen[str]") -> tuple[int, str, str]:
    """Return the exit code and the output of a process."""
    out, err = process.communicate(timeout=240)
    return process.returncode, out, err


class Recorder:
    """Passes one connection on to a port of this host, and keeps all bytes of both directions."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.seen = bytearray()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with self._listener:
            while True:
                guest, _ = self._listener.accept()
                try:
                    host = socket.create_connection(("127.0.0.1", self._port))
                    break
                except OSError:  # node 0 does not listen yet
                    guest.close()
        for source, goal in ((guest, host), (host, guest)):
            threading.Thread(target=self._copy, args=(source, goal), daemon=True).start()

    def _copy(self, source: socket.socket, goal: socket.socket) -> None:
        with source, suppress(OSError):  # an end that has nothing more to say may reset the connection
            while data := source.recv(1 << 16):
                self.seen += data
                goal.sendall(data)
            goal.shutdown(socket.SHUT_WR)


def test_neither_the_secret_nor_the_environment_travels_between_nodes(tmp_path: Path) -> None:
    secret = "s3" * 20
    key = tmp_path / "key"
    key.write_text(secret)
    key.chmod(0o644)
    port = free_port()
    between = Recorder(port)
    common = {"MULTIRING_SECRET_FILE": str(key), "MULTIRING_INTERFACE": "127.0.0.1", "TOKEN": "a-private-token"}
    nodes = [
        started(
            *("--nodes", "2", "--node-rank", str(node), "--meet", f"127.0.0.1:{met_at}", "-n", "1"),
            *(sys.executable, "-c", SHOW),
            **common,
        )
        for node, met_at in enumerate((port, between.port))
    ]
    ends = [told(process) for process in nodes]
    assert [code for code, _, _ in ends] == [0, 0], ends
    for _, _, err in ends:
        assert err.count(f"every user of this host can read the secret in MULTIRING_SECRET_FILE={str(key)!r}") == 1
        assert "(mode 0644)" in err
    assert b'"plan"' in between.seen
    assert b'"start"' in between.seen
    for hidden in (secret, secret.encode().hex(), "a-private-token"):
        assert hidden.encode() not in between.seen
    for rank, (_, out, _) in enumerate(ends):
        name, rank_secret = out.removeprefix(f"[{rank}] ").split()
        assert rank_secret == secret_of_start(secret.encode(), name)
        assert rank_secret.encode() not in between.seen


def test_a_job_within_a_named_job_ends_only_its_own_processes() -> None:
    """The launcher and its agent carry the outer job's name, by which leftover processes are found."""
    code, out, err = told(started("--hosts", "localhost:2", sys.executable, "-c", SHOW, MULTIRING_JOB="outer"))
    assert code == 0, err
    names = {line.split()[1] for line in out.splitlines()}
    assert len(names) == 1
    assert names.pop().startswith("outer/hosts-")


def test_each_start_has_its_own_name_and_secret(tmp_path: Path) -> None:
    once = (
        f"{SHOW}; from pathlib import Path; been = Path({str(tmp_path / 'been')!r}); is_first = not been.exists(); "
        "been.touch(); raise SystemExit(3 if is_first else 0)"
    )
    code, out, err = told(started("--hosts", "localhost:1", "--max-restarts", "1", sys.executable, "-c", once))
    assert code == 0, err
    (first, first_secret), (second, second_secret) = (line.split()[1:] for line in out.splitlines())
    assert first_secret != second_secret
    assert first.removesuffix("-0") == second.removesuffix("-1")
    assert first != second


def test_a_slow_login_is_not_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time for a login is the launcher's to decide. Silence counts from the agent's first word."""
    monkeypatch.setattr(control_link, "SILENT_S", 0.2)
    (reading, there), (unread, writing) = os.pipe(), os.pipe()
    link = ControlLink(reading, writing, begins_with=AGENT_BEGINS)
    os.write(there, b"Welcome to this host\n")
    link.read_some()
    time.sleep(0.3)
    silent = [link.has_fallen_silent]
    assert link.wake_at > time.monotonic()
    os.write(there, AGENT_BEGINS)
    link.read_some()
    time.sleep(0.3)
    silent.append(link.has_fallen_silent)
    assert silent == [False, True]
    link.close()
    for descriptor in (there, unread):
        os.close(descriptor)


@pytest.mark.parametrize(("wire_timeout_s", "silence_s"), [(60.0, 15.0), (12.0, 12.0), (10.0, 10.0), (0.5, 8.0)])
def test_in_elastic_jobs_silence_lasts_no_longer_than_a_cut_wire(wire_timeout_s: float, silence_s: float) -> None:
    reading, writing = os.pipe()
    link = ControlLink(reading, writing)
    for chosen, wanted in ((link.patience_s, 15.0), (silence_of(wire_timeout_s), silence_s)):
        link.patience_s = chosen
        for passed, is_silent in ((wanted - 0.5, False), (wanted + 0.5, True)):
            link._heard_at = time.monotonic() - passed
            assert link.has_fallen_silent == is_silent
    link.close()


def test_ssh_of_a_job_is_no_master_of_other_sessions() -> None:
    """It ends with the job, and would take the user's other sessions with it."""
    assert "-oControlMaster=no" in ssh_words("user@host", (), os.environ)


def test_a_host_that_cannot_start_its_ranks_is_not_waited_for(tmp_path: Path) -> None:
    """Its ranks are none that the kernel holds: the error comes without the wait for those."""
    script = tmp_path / "script"
    script.write_text("#!/no/such/interpreter\n")
    script.chmod(0o755)
    # Ranks that the kernel holds would be waited for until the time-out of this test.
    main = "import sys; from multiring._launch import job; from multiring._cli import main; job._STUCK_S = 1000.0; "
    command = [
        sys.executable,
        "-c",
        f"{main}sys.exit(main(sys.argv[1:]))",
        "run",
        "--hosts",
        "localhost:2",
        str(script),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 127
    assert f"cannot execute {str(script)!r}: its interpreter does not exist" in done.stderr


def test_no_rank_starts_if_its_log_cannot_be_written(tmp_path: Path) -> None:
    mark = tmp_path / "started"
    done = subprocess.run(
        [*module_command("multiring", "run"), "--hosts", "localhost:2", "--log-dir", "/proc/no", "touch", str(mark)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert "cannot write /proc/no/rank-0.out: No such file or directory" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.returncode != 0
    assert not mark.exists()


def test_what_agents_say_of_ranks_that_were_not_made_is_no_error() -> None:
    job, sessions, theirs = hosts_job(0)
    job._members.clear()
    job._host_of.clear()
    job._hear(sessions[0], {"pids": {"0": 7}, "start": 0})
    job._hear(sessions[0], StreamData(0, 0, STDOUT, b"text"))
    job._hear(sessions[0], {"ended": 0, "code": 3, "lines": [], "memory": "", "start": 0})
    assert job._reap_ended() == []
    for each in theirs:
        each.close()
    job._sessions.close(0)


def ssh_to_here(folder: Path) -> dict[str, str]:
    """Make a program ssh that runs its command on this host, and return the variables to find it."""
    folder.mkdir(exist_ok=True)
    program = folder / "ssh"
    program.write_text('#!/bin/sh\nfor command; do :; done\ncd "$HOME"\nexec /bin/sh -c "$command"\n')
    program.chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


def test_one_host_under_two_names_is_refused(tmp_path: Path) -> None:
    """Two agents of one host would pin their ranks to the same cores."""
    ssh = ssh_to_here(tmp_path / "bin")
    code, out, err = told(started("--hosts", "localhost:2,elsewhere:1", sys.executable, "-c", SHOW, **ssh))
    assert (code, out) == (2, "")
    assert err == ("multiring: localhost and elsewhere are one host: want one name for it, as in --hosts localhost:3\n")


DEAF = ("/bin/sh", "-c", "trap '' TERM; echo going >&2; while :; do sleep 0.1; done")


def break_link(session: HostSession) -> None:
    """Close the connection of a session."""
    assert session.link is not None
    session.link.close("it has sent nothing")


def wait_for(is_true: Callable[[], bool]) -> None:
    """Wait until a condition holds."""
    until = time.monotonic() + 240
    while not is_true():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_many_lost_hosts_do_not_block_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Healthy hosts must hear from it meanwhile, or they end their ranks."""
    sessions = HostSessions([HostSession(f"host{each}", each, 1, lambda new: new.open_by(DEAF)) for each in range(8)])
    sessions.open()
    processes = [each.process for each in sessions.all if each.process is not None]
    assert len(processes) == 8
    wait_for(lambda: all(each.told(0) == "going" for each in processes))
    with monkeypatch.context() as patched:
        patched.setattr(subprocess.Popen, "wait", lambda *_: pytest.fail("the launcher waits for a process"))
        for session in sessions.all:
            break_link(session)
        assert not any(session.is_lost for session in sessions.all)
        assert sessions.wake_at is not None
        wait_for(lambda: all(session.is_lost for session in sessions.all))
        assert sessions.all[0].reason() == "going"
        for session in sessions.all:
            sessions.lose(session)
        assert not any(session.is_open for session in sessions.all)
        assert not any(process.has_ended for process in processes)  # they have a second

        def are_ended() -> bool:
            sessions.end_processes()
            return sessions.wake_at is None

        wait_for(are_ended)
    assert all(process.ending == "/bin/sh was killed by SIGKILL" for process in processes)
    sessions.close(0)


def test_a_step_goes_on_without_the_agent_of_its_first_host() -> None:
    """It has started the agents of the other hosts, too."""
    steps = []

    def step() -> AgentProcess:
        steps.append(open_step(DEAF, os.environ, b""))
        return steps[-1]

    sessions = HostSessions([HostSession(f"node {each}", each, 1) for each in range(2)], step)
    sessions.open()
    ends = [socket.socketpair() for _ in range(2)]
    for node, (ours, _) in enumerate(ends):
        sessions.seat(node, ControlLink(ours.fileno(), ours.detach()))
    sessions.open()
    assert [len(steps)] == [1]
    first, second = sessions.all
    break_link(first)
    wait_for(lambda: first.is_lost)
    sessions.lose(first)
    assert [second.is_open] == [True]
    assert sessions.wake_at == second.wake_at  # no process is asked to end
    assert not steps[0].has_ended
    sessions.open()  # a restart needs all agents, which a new step starts
    assert [len(steps)] == [2]
    assert not second.is_open
    sessions.close(0)
    assert [each.ending for each in steps] == ["/bin/sh was killed by SIGKILL"] * 2
    for _, theirs in ends:
        theirs.close()


def test_a_secret_that_the_user_alone_can_read_is_taken_silently(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    key = tmp_path / "key"
    key.write_text("s" * 32)
    key.chmod(0o600)
    monkeypatch.setenv("MULTIRING_SECRET_FILE", str(key))
    assert _secret_of(Settings.from_environment(os.environ, horovod=False)) == b"s" * 32
    assert capfd.readouterr().err == ""


def test_a_slow_reader_of_the_output_is_no_lost_launcher(tmp_path: Path) -> None:
    """The launcher waits for its reader after the ranks' end. The agents must hear from it meanwhile."""
    (tmp_path / "sitecustomize.py").write_text(
        "from multiring._launch import control_link\ncontrol_link.SILENT_S, control_link._PING_S = 8.0, 0.5\n"
    )
    path = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    common = {"MULTIRING_SECRET": "s" * 32, "MULTIRING_INTERFACE": "127.0.0.1", "PYTHONPATH": path}
    met_at = f"127.0.0.1:{free_port()}"
    programs = ("print('x' * 300_000)", f"open({str(tmp_path / 'done')!r}, 'w')")
    nodes = [
        started(
            *("--nodes", "2", "--node-rank", str(node), "--meet", met_at, "-n", "1", sys.executable, "-c", program),
            **common,
        )
        for node, program in enumerate(programs)
    ]
    wait_for((tmp_path / "done").exists)
    time.sleep(20)
    assert [node.poll() for node in nodes] == [None, None]
    (code, out, err), (other_code, _, other_err) = (told(process) for process in nodes)
    assert len(out) > 300_000
    assert (code, other_code) == (0, 0), err + other_err
    assert "lost" not in err + other_err


def hosts_job(number: int, ranks: int = 2) -> tuple[HostsJob, list[HostSession], list[socket.socket]]:
    """Return start `number` of a job with a rank on each of some hosts, and the agents' ends of the connections."""
    sessions = [HostSession(f"host{each}", each, 1) for each in range(ranks)]
    theirs = []
    for session in sessions:
        ours, other = socket.socketpair()
        theirs.append(other)
        session.take_link(ControlLink(ours.fileno(), ours.detach()))
    settings = Settings.from_environment({}, horovod=False)
    task = task_of({}, settings, 1.0, "", b"")
    job = HostsJob(HostSessions(sessions), task, JobOptions(), number)
    job._members = [JobProcess(f"rank {each}", None, ToldLines(), ToldLines()) for each in range(ranks)]
    job._host_of = list(sessions)
    return job, sessions, theirs


def test_an_end_that_was_heard_of_is_looked_at_at_once() -> None:
    """The next message of an agent may come three seconds later."""
    job, sessions, theirs = hosts_job(0)
    assert (job._next_wake() or 0.0) > time.monotonic() + 1.0
    job._hear(sessions[0], {"ended": 0, "code": 3, "lines": [], "memory": "", "start": 0})
    assert (job._next_wake() or 0.0) <= time.monotonic()
    for each in theirs:
        each.close()


def test_what_belongs_to_an_earlier_start_is_ignored() -> None:
    job, sessions, theirs = hosts_job(1)
    sessions[0].is_over = False
    job._members.clear()  # the ranks of this start have not been started
    job._hear(sessions[0], StreamData(0, 1, STDOUT, b"late"))
    job._hear(sessions[0], {"ended": 1, "code": 3, "lines": [], "memory": "", "start": 0})
    job._hear(sessions[0], {"over": True, "start": 0})
    assert [sessions[0].is_over] == [False]
    job._hear(sessions[0], {"over": True, "start": 1})
    assert sessions[0].is_over
    for each in theirs:
        each.close()
    job._sessions.close(0)


def test_a_silent_host_of_a_lost_rank_may_be_the_cause() -> None:
    job, sessions, theirs = hosts_job(0)
    first, second = job._members
    first.set_code(1)
    job._failed.append(first)
    assert not job._may_hear_the_cause()  # the rank has lost nobody
    job._lost[0] = {1}
    link = sessions[1].link
    assert link is not None
    verdicts = [job._may_hear_the_cause()]
    link._heard_at = time.monotonic() - QUIET_S
    verdicts.append(job._may_hear_the_cause())
    job._settle_until = began = time.monotonic()
    job._do_more()
    assert job._settle_until > began  # no other rank is named meanwhile
    link.close("it was lost")
    verdicts.append(job._may_hear_the_cause())
    second.set_code(-9)
    verdicts.append(job._may_hear_the_cause())
    assert verdicts == [False, True, True, False]
    for each in theirs:
        each.close()
    job._sessions.close(0)


def test_only_a_signal_that_a_host_reports_again_is_a_second_one(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = SignalCounts()
    hosts = [None, 0, 1, 1, None, 0, 0]
    assert [counts.is_new(2, host) for host in hosts] == [True, False, False, True, False, False, True]
    assert counts.is_new(15, 1)
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 6)
    assert counts.is_new(2, 1)


def test_a_closed_connection_is_not_full() -> None:
    """A full one keeps the output of the ranks from being read."""
    ours, theirs = socket.socketpair()
    with theirs:
        link = ControlLink(ours.fileno(), ours.detach())
        link.send_stream(0, 0, STDOUT, b"x" * (1 << 21))
        assert [link.is_full] == [True]
        link.close()
        assert not link.is_full


def test_a_slow_stranger_does_not_hold_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that listens at the launcher's address and sends a byte now and then."""
    monkeypatch.setattr(control_tcp, "_HANDSHAKE_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    guest, _ = listener.accept()
                    with guest, suppress(OSError):
                        guest.sendall(bytes((0, 0, 0, 200)))  # a frame's length
                        for _ in range(200):
                            guest.sendall(b" ")
                            time.sleep(0.1)

        threading.Thread(target=serve, daemon=True).start()
        with pytest.raises(LaunchError, match=r"for 2 s: .*in time"):
            connect(f"127.0.0.1:{listener.getsockname()[1]}", b"s", 1, 2.0)


def test_only_the_last_refusals_are_kept() -> None:
    listener = ControlListener(TcpAddress("127.0.0.1", 0), b"s")
    for number in range(100):
        listener.refusals.append(f"{number}")
    assert len(listener.refusals) == 8
    listener.close()


def test_the_exit_code_stays_if_the_job_cannot_start_again(tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text('#!/bin/sh\nrm "$0"\nexit 3\n')
    script.chmod(0o755)
    code, _, err = told(started("--hosts", "localhost:1", "--max-restarts", "2", str(script)))
    assert code == 3, err
    assert "the job could not be started again: " in err


def test_files_of_the_current_folder_do_not_shadow_the_standard_library(tmp_path: Path) -> None:
    (tmp_path / "secrets.py").write_text("raise SystemExit('the wrong module')")
    command = module_command("multiring._launch.host_agent", "none")
    done = subprocess.run(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, timeout=240, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("multiring: only multiring run starts this module")


def test_the_users_own_forwardings_and_commands_are_not_for_agents() -> None:
    words = ssh_words("host", (), os.environ)
    assert {"-oRemoteCommand=none", "-oClearAllForwardings=yes"} < set(words[: words.index("host")])


def test_the_reason_of_a_loss_is_not_what_was_printed_before_the_agent_came() -> None:
    script = "echo 'srun: a warning' >&2; read line; echo 'srun: the reason' >&2; read line; kill -9 $$"
    with subprocess.Popen(
        ["/bin/sh", "-c", script], stdin=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0
    ) as process:
        assert process.stdin is not None
        agents = AgentProcess(process, "srun")
        early, late = HostSession("host0", 0, 1), HostSession("host1", 1, 1)
        early.process = late.process = agents
        while not agents.lines_told():
            time.sleep(0.01)
        early.take_hello({})
        assert early.reason() == ""
        assert late.reason() == "srun: a warning"  # its agent has not come: this may be why
        process.stdin.write(b"on\n")
        while agents.lines_told() < 2:
            time.sleep(0.01)
        assert early.reason() == "srun: the reason"
        late.take_hello({})
        process.stdin.write(b"on\n")
        process.wait(240)
        assert late.reason() == "srun was killed by SIGKILL"


@pytest.mark.parametrize(
    ("told", "lost"),
    [
        ("srun: error: host1: task 1: Exited with exit code 13", {1}),
        ("srun: error: host[1-3,5]: tasks 1-3,5: Killed", {1, 2, 3, 5}),
        ("srun: warning: host1: task 1: is slow", set()),
    ],
)
def test_an_agent_whose_end_srun_tells_is_not_waited_for(told: str, lost: set[int]) -> None:
    script = f"echo '{told}' >&2; sleep 0.2; echo 'slurmstepd: error: execve(): the reason' >&2; read line"
    with subprocess.Popen(
        ["/bin/sh", "-c", script], stdin=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0
    ) as process:
        assert process.stdin is not None
        agents = AgentProcess(process, "srun")
        sessions = [HostSession(f"node {node}", node, 1) for node in range(7)]
        for session in sessions:
            session.process = agents
        while not agents.lines_told():
            time.sleep(0.01)
        assert {node for node in range(7) if agents.has_lost_task(node)} == lost
        for node in lost:
            wait_for(lambda node=node: sessions[node].has_ended_early)  # type: ignore[misc]
            assert sessions[node].reason().endswith("the reason")
        assert not any(session.has_ended_early for session in sessions if session.index not in lost)
        process.stdin.write(b"on\n")


def test_a_signal_before_all_nodes_have_come_ends_the_job_and_is_named() -> None:
    port = free_port()
    words = ("--nodes", "2", "--node-rank", "0", "--meet", f"127.0.0.1:{port}", "-n", "1", "true")
    process = started(*words, MULTIRING_SECRET="of the test")  # noqa: S106 -- of the test
    assert process.stderr is not None
    while "waiting for node 1" not in process.stderr.readline():
        assert process.poll() is None
    process.terminate()
    code, _, err = told(process)
    assert code == 143
    assert "multiring: SIGTERM received; no rank was started\n" in err
