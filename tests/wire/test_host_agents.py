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

from multiring._launch import control_link
from multiring._launch.agent_process import AgentProcess
from multiring._launch.control_link import AGENT_BEGINS, ControlLink, secret_of_start
from multiring._launch.host_sessions import HostSession, HostSessions, open_step, ssh_words

RUN = (sys.executable, "-m", "multiring", "run")
SHOW = "import os; print(os.environ['MULTIRING_JOB'], os.environ['MULTIRING_SECRET'], flush=True)"


def started(*words: str, **variables: str) -> "subprocess.Popen[str]":
    """Start multiring run."""
    environment = os.environ | variables
    return subprocess.Popen([*RUN, *words], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def told(process: "subprocess.Popen[str]") -> tuple[int, str, str]:
    """Return the exit code and the output of a process."""
    out, err = process.communicate(timeout=120)
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
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
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
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 127
    assert f"cannot execute {str(script)!r}: its interpreter does not exist" in done.stderr


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
    until = time.monotonic() + 60
    while not is_true():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_many_lost_hosts_do_not_block_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Healthy hosts must hear from it meanwhile, or they end their ranks."""
    sessions = HostSessions([HostSession(f"host{each}", each, 1, lambda new: new.open_by(DEAF)) for each in range(8)])
    sessions.open()
    processes = [each.process for each in sessions.all if each.process is not None]
    assert len(processes) == 8
    wait_for(lambda: all(each.told == "going" for each in processes))
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
        while sessions.wake_at is not None:
            sessions.end_processes()
            time.sleep(0.01)
    assert all(process.ending == "/bin/sh ended with exit code -9" for process in processes)
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
    assert len(steps) == 1
    first, second = sessions.all
    break_link(first)
    wait_for(lambda: first.is_lost)
    sessions.lose(first)
    assert second.is_open
    assert sessions.wake_at == second.wake_at  # no process is asked to end
    assert not steps[0].has_ended
    sessions.open()  # a restart needs all agents, which a new step starts
    assert len(steps) == 2
    assert not second.is_open
    sessions.close(0)
    assert [each.ending for each in steps] == ["/bin/sh ended with exit code -9"] * 2
    for _, theirs in ends:
        theirs.close()
