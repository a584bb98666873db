"""`multiring run --hosts` by ssh with hosts that cannot be used: one clear error on the launching terminal."""

import sys
import time

import pytest
from tests.support import other_installs
from tests.support.ssh_hosts import HOME, ROOT, RUN, SshHosts

from multiring.lab import parse_fault

SAY = "import multiring\nmultiring.init().barrier()\nprint('well', flush=True)\n"


def refused(hosts: SshHosts, *words: str, code: int = 2, within_s: float = 200.0, **variables: str) -> str:
    """Return the one line with which `multiring run` refuses; nothing may be left on any host."""
    hosts.write("say.py", SAY)
    began = time.monotonic()
    done = hosts.launch(*words, "say.py", on=0, **variables)
    assert done.returncode == code, done.stderr
    assert time.monotonic() - began < within_s
    lines = [line for line in done.stderr.splitlines() if line]
    assert len(lines) == 1, done.stderr
    for number in range(3):
        assert hosts.wait_until_gone(number) == []
    return lines[0]


def test_an_unknown_key(hosts: SshHosts) -> None:
    user = hosts.lab.hosts[0]
    hosts.as_root(user, f"sed -i.kept /host1/d {HOME}/.ssh/known_hosts")
    try:
        told = refused(hosts, "--hosts", "host0:1,host1:1")
    finally:
        hosts.as_root(user, f"mv {HOME}/.ssh/known_hosts.kept {HOME}/.ssh/known_hosts")
    assert "multiring: host1: no agent runs there: " in told
    assert "Host key verification failed" in told
    assert "connect once by hand with `ssh host1`" in told


def test_a_prompt_for_a_password(hosts: SshHosts) -> None:
    there = hosts.lab.hosts[1]
    hosts.as_root(there, f"mv {HOME}/.ssh/authorized_keys {HOME}/.ssh/kept")
    try:
        told = refused(hosts, "--hosts", "host0:1,host1:1")
    finally:
        hosts.as_root(there, f"mv {HOME}/.ssh/kept {HOME}/.ssh/authorized_keys")
    assert "host1: no agent runs there: " in told
    assert "Permission denied" in told
    assert "ssh-copy-id host1" in told


def test_a_name_that_nobody_knows(hosts: SshHosts) -> None:
    told = refused(hosts, "--hosts", "host0:1,nowhere:1")
    assert "nowhere: no agent runs there: ssh: Could not resolve hostname nowhere" in told


def test_no_such_folder_there(hosts: SshHosts) -> None:
    hosts.write("only/say.py", SAY, [0])
    done = hosts.run(0, [*RUN, "--hosts", "host0:1,host1:1", "say.py"], HOME / "only")
    assert done.returncode == 2
    assert (
        f"multiring: host1: the folder {HOME}/only cannot be entered there (No such file or directory)" in done.stderr
    )


def test_no_such_script_there(hosts: SshHosts) -> None:
    hosts.write("mine.py", SAY, [0])
    done = hosts.launch("--hosts", "host0:1,host1:1", "mine.py")
    assert done.returncode == 2
    assert "rank 1" in done.stderr
    assert "on host1) failed: exit code 2" in done.stderr
    assert f"can't open file '{HOME}/mine.py'" in done.stderr


COPY = "mkdir -p multiring; cp -r {source}/. multiring"
# The editable installation of a checkout comes before PYTHONPATH.
WITHOUT_CHECKOUT = (
    "import sys; sys.meta_path[:] = [each for each in sys.meta_path if 'ScikitBuild' not in type(each).__name__]"
)
OTHER_VERSION = "sed -i 's/VERSION = .*/VERSION = \"0.0.7\"/' multiring/_version.py"


@pytest.mark.parametrize(
    ("prepare", "words"),
    [
        ("touch multiring.py", "No module named"),
        ("mkdir -p multiring/_launch; touch multiring/__init__.py multiring/_launch/__init__.py", "No module named"),
        (f"{COPY}; {OTHER_VERSION}", "host1 has multiring 0.0.7 on Python"),
    ],
    ids=["another multiring", "older", "other version"],
)
def test_another_multiring_there(hosts: SshHosts, prepare: str, words: str) -> None:
    source = ROOT / "src" / "multiring"
    library = HOME / "library"
    hosts.as_root(hosts.lab.hosts[0], f"mkdir -p {library}; ln -sfn {source} {library}/multiring")
    there = f"rm -rf {library}; mkdir {library}; cd {library}; {prepare.format(source=source)}"
    there += f'; echo "{WITHOUT_CHECKOUT}" >sitecustomize.py; chmod -R a+rX {library}'
    hosts.as_root(hosts.lab.hosts[1], there)
    told = refused(hosts, "--hosts", "host0:1,host1:1", PYTHONPATH=str(library))
    assert words in told
    assert "host1" in told


def test_no_such_python_there(hosts: SshHosts) -> None:
    hosts.write("say.py", SAY)
    python = f"{HOME}/environment/bin/python"
    script = f"mkdir -p {HOME}/environment/bin; ln -sfn {sys.executable} {python}"
    hosts.as_root(hosts.lab.hosts[0], script)
    hosts.as_root(hosts.lab.hosts[0], f"cp {sys.prefix}/pyvenv.cfg {HOME}/environment")
    site = next(path for path in sys.path if path.endswith("site-packages"))
    command = [python, "-m", "multiring", "run", "--hosts", "host0:1,host1:1", "say.py"]
    done = hosts.run(0, command, PYTHONPATH=f"{ROOT}/src:{site}")
    assert done.returncode == 2, done.stderr
    told = f"host1: no agent runs there: env: '{python}': No such file or directory; this Python must be on every host"
    assert told in done.stderr


@pytest.mark.parametrize(
    ("there", "words"),
    [
        (other_installs.other_multiring(), "host1 has multiring 0.0.7 on Python"),
        (other_installs.no_multiring(), "that Python has no multiring of this version: install it there"),
        (other_installs.other_python(), f"on Python {sys.version_info[0]}.{sys.version_info[1]}.99, and this host has"),
        (
            other_installs.closed_python(),
            "Permission denied; the user of this job must be able to execute this Python on every host",
        ),
    ],
    ids=["other version", "no multiring", "other Python", "another user's Python"],
)
def test_another_installation_there(hosts: SshHosts, there: str, words: str) -> None:
    hosts.as_root(hosts.lab.hosts[1], there)
    try:
        told = refused(hosts, "--hosts", "host0:1,host1:1")
    finally:
        hosts.as_root(hosts.lab.hosts[1], other_installs.undone())
    assert words in told
    assert "host1" in told


def test_ports_that_a_firewall_closes(hosts: SshHosts) -> None:
    hosts.write("say.py", SAY)
    hosts.as_root(hosts.lab.hosts[0], other_installs.closed_ports(23400, 23420))
    try:
        done = hosts.launch(
            "--hosts", "host0:1,host1:1", "say.py", MULTIRING_PORTS="23400-23420", MULTIRING_INIT_TIMEOUT_S="8"
        )
    finally:
        hosts.as_root(hosts.lab.hosts[0], other_installs.undone())
    assert done.returncode == 1, done.stderr
    assert "RendezvousError" in done.stderr
    assert "rank 1 found no rank 0 at 10." in done.stderr
    assert "(last attempt: timed out)" in done.stderr
    assert "; nothing answers: a firewall may close this port: MULTIRING_PORTS=" in done.stderr
    for number in range(3):
        assert hosts.wait_until_gone(number) == []


def test_more_ranks_than_places(hosts: SshHosts) -> None:
    told = refused(hosts, "-n", "5", "--hosts", "host0:2,host1:2")
    assert "5 ranks, but host0:2,host1:2 has places for 4; want fewer ranks, or more hosts" in told


def test_ports_that_are_taken(hosts: SshHosts) -> None:
    listen = "import socket, time\nmade = socket.create_server(('', 23456))\nprint('on', flush=True)\ntime.sleep(100)\n"
    hosts.write("listen.py", listen)
    listener = hosts.start(0, ["python", "listen.py"])
    assert listener.stdout is not None
    assert listener.stdout.readline() == b"on\n"
    hosts.write("say.py", SAY)
    done = hosts.launch("--hosts", "host0:1,host1:1", "say.py", MULTIRING_PORTS="23456-23456")
    listener.kill()
    listener.wait()
    assert done.returncode == 2
    assert "multiring: host0: no port of 23456 to 23456 is free at 10." in done.stderr
    assert "MULTIRING_PORTS sets the range" in done.stderr


def test_a_host_that_does_not_answer_and_ssh_config(own_hosts: SshHosts) -> None:
    hosts = own_hosts
    config = "Host far\n HostName host1\n Port 22\nHost *\n ConnectTimeout 3\n"
    # What a user may want of an own session: port 22 of this host is sshd's.
    config += " RemoteCommand top\n LocalForward 22 localhost:80\n ExitOnForwardFailure yes\n"
    hosts.write(".ssh/config", config, [0])
    hosts.write("say.py", SAY)
    done = hosts.launch("--hosts", "host0:1,far:1", "say.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("well") == 2
    hosts.lab.apply(parse_fault(["cut", "host1"], hosts.lab.plan))
    told = refused(hosts, "--hosts", "host0:1,far:1")
    assert "far: no agent runs there: ssh: connect to host host1 port 22: Connection timed out" in told
    hosts.write(".ssh/config", "Host *\n ConnectTimeout 100\n", [0])
    told = refused(hosts, "--hosts", "host0:1,host1:1", MULTIRING_INIT_TIMEOUT_S="4")
    assert "host1: no answer within 4 s; try `ssh HOST true`" in told
