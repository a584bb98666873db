"""`multiring run --hosts` by ssh: output, failures, signals, restarts and ends, on two and three hosts."""

import re
import signal
import sys
import time

import pytest
from tests.support import secret_search
from tests.support.secret_search import secret_shown
from tests.support.ssh_hosts import HOME, RUN, UID, Process, SshHosts

from multiring.lab import parse_fault

TALK = """
import os, sys
import numpy as np, multiring
group = multiring.init()
total = np.full(1000, group.rank + 1.0)
group.all_reduce(total)
sys.stdout.write("x" * 100_000 + f"end {group.rank}\\n")
told = [group.rank, os.uname().nodename, multiring.local_rank(), int(total[0]), *sys.argv[1:]]
sys.stderr.write(f"err {' '.join(map(str, told))}\\n")
"""
WORK = """
import os, signal, sys, time
from pathlib import Path
import numpy as np, multiring
asked = []
signal.signal(signal.SIGINT, lambda number, frame: asked.append(number))
signal.signal(signal.SIGUSR1, lambda number, frame: Path(f"usr1-{os.environ['RANK']}").touch())
group = multiring.init()
Path(f"pid-{group.rank}").write_text(str(os.getpid()))
os.system("sleep 1000 &")
print("at work", flush=True)
while True:
    stop = np.array([bool(asked)], np.uint8)
    group.all_reduce(stop, "max")
    if stop[0]:
        break
    time.sleep(0.05)
Path(f"saved-{group.rank}").write_text("saved")
print("saved", flush=True)
"""


def at_work(hosts: SshHosts, *words: str, ranks: int = 2) -> Process:
    """Start WORK and return the launcher's process when all ranks are at work."""
    hosts.write("work.py", WORK)
    process = hosts.start(0, [*RUN, *words, "work.py"])
    assert process.stdout is not None
    lines = [process.stdout.readline().decode() for _ in range(ranks)]
    assert all("at work" in line for line in lines), (lines, process.communicate()[1].decode())
    return process


def nothing_left(hosts: SshHosts, *numbers: int) -> None:
    """Assert that the user has no process on the hosts within two minutes."""
    for number in numbers or range(3):
        assert hosts.wait_until_gone(number) == []


@pytest.mark.parametrize("places", ["host0:2,host1:2", "host1:1,host2:2,host0:1"])
def test_output_is_whole_and_tagged(hosts: SshHosts, places: str) -> None:
    hosts.write("talk.py", TALK)
    done = hosts.launch("--hosts", places, "--log-dir", "logs", "talk.py", "a b")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] {'x' * 100_000}end {rank}" for rank in range(4)]
    told = [line.split() for line in sorted(done.stderr.splitlines()) if " err " in line]
    where = [
        (name, local)
        for name, _, count in (each.partition(":") for each in places.split(","))
        for local in range(int(count))
    ]
    assert told == [
        [f"[{rank}]", "err", str(rank), name, str(local), "10", "a", "b"] for rank, (name, local) in enumerate(where)
    ]
    assert hosts.read(0, "logs/rank-3.out") == f"{'x' * 100_000}end 3\n"
    nothing_left(hosts)


def test_a_killed_rank_is_named_with_its_host(hosts: SshHosts) -> None:
    process = at_work(hosts, "--hosts", "host0:1,host1:1,host2:1", ranks=3)
    pid = hosts.read(1, "pid-1")
    hosts.as_root(hosts.lab.hosts[1], f"kill -9 {pid}")
    _, err = process.communicate(timeout=240)
    assert process.returncode == 137
    assert f"multiring: rank 1 (pid {pid} on host1) failed: killed by SIGKILL\n" in err.decode()
    nothing_left(hosts)


def test_ctrl_c_lets_all_ranks_save(hosts: SshHosts) -> None:
    for each in hosts.lab.hosts:
        hosts.as_root(each, f"rm -f {HOME}/usr1-* {HOME}/saved-*")  # those of tests before, which had the same hosts
    process = at_work(hosts, "--hosts", "host0:1,host1:1")
    process.send_signal(signal.SIGUSR1)
    # Python handles signals that arrive together by their numbers: SIGINT would end the rank first.
    heard = f"for _ in $(seq 2000); do [ -e {HOME}/usr1-1 ] && exit; sleep 0.1; done; exit 1"
    hosts.as_root(hosts.lab.hosts[1], heard)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=240)
    assert process.returncode == 130, err.decode()
    assert sorted(out.decode().splitlines()) == ["[0] saved", "[1] saved"]
    assert hosts.read(0, "saved-0") == hosts.read(1, "saved-1") == "saved"
    assert hosts.read(1, "usr1-1") == ""
    nothing_left(hosts)


def test_grace_ends_ranks_that_do_not_stop(hosts: SshHosts) -> None:
    ignoring = "import signal, time\nsignal.signal(15, signal.SIG_IGN)\n"
    hosts.write("deaf.py", f"{ignoring}print('deaf', flush=True)\ntime.sleep(1000)")
    process = hosts.start(0, [*RUN, "--grace", "1", "--hosts", "host1:1,host2:1", "deaf.py"])
    assert process.stdout is not None
    for _ in range(2):
        assert b"deaf" in process.stdout.readline()
    process.terminate()
    _, err = process.communicate(timeout=240)
    assert process.returncode == 143
    assert "killing ranks 0, 1, which did not stop" in err.decode()
    nothing_left(hosts)


@pytest.mark.parametrize("victim", ["multiring run", "ssh"])
def test_a_killed_launcher_or_session_leaves_nothing(hosts: SshHosts, victim: str) -> None:
    process = at_work(hosts, "--hosts", "host1:1,host2:1")
    if victim == "ssh":
        hosts.as_root(hosts.lab.hosts[0], "kill -9 $(pgrep -f '[s]sh.*host2')")
        _, err = process.communicate(timeout=240)
        assert process.returncode == 137, err.decode()
        assert re.search(r"multiring: rank 1 \(pid \d+ on host2\) failed: its host was lost", err.decode())
    else:
        process.kill()
        process.wait()
    nothing_left(hosts)


def test_a_restart_has_a_new_secret_on_all_hosts(hosts: SshHosts) -> None:
    hosts.write(
        "again.py",
        """
        import hashlib, os, sys
        from pathlib import Path
        secret = os.environ["MULTIRING_SECRET"]
        import multiring
        group = multiring.init()
        print("secret", hashlib.sha256(secret.encode()).hexdigest(), flush=True)
        group.barrier()
        first = Path("been")
        if group.rank == 1 and not first.exists():
            first.touch()
            sys.exit(5)
        """,
    )
    done = hosts.launch("--max-restarts", "2", "--hosts", "host0:1,host1:1", "--log-dir", "logs", "again.py")
    assert done.returncode == 0, done.stderr
    assert "multiring: rank 1 (pid" in done.stderr
    assert "start 2 of at most 3: all ranks, with a new secret" in done.stderr
    secrets = [line.split()[-1] for line in done.stdout.splitlines() if "secret" in line]
    assert len(secrets) == 4
    assert len(set(secrets)) == 2
    assert "secret" in hosts.read(0, "logs/restart-1/rank-1.out")
    nothing_left(hosts)


def test_a_small_limit_of_open_files_does_not_limit_the_hosts(hosts: SshHosts) -> None:
    hosts.write("say.py", "import multiring\nmultiring.init().barrier()\n")
    limited = ["sh", "-c", 'ulimit -Sn 13; exec "$@"', "sh", *RUN, "--hosts", "host0:1,host1:1,host2:1", "say.py"]
    done = hosts.run(0, limited)  # three sessions need 15 descriptors or more
    assert done.returncode == 0, done.stderr


def test_standard_input_reaches_one_rank_of_another_host(hosts: SshHosts) -> None:
    hosts.write("ask.py", "import sys\nprint(len(sys.stdin.read()), flush=True)")
    done = hosts.run(0, [*RUN, "--stdin", "1", "--hosts", "host0:1,host1:1", "ask.py"], text=b"y" * 3_000_000)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0] 0", "[1] 3000000"]


def test_files_of_the_user_do_not_shadow_the_standard_library(hosts: SshHosts) -> None:
    """Agents start in the home folder, and one of this host in the job's folder."""
    hosts.write("secrets.py", "raise SystemExit('the wrong module')")
    hosts.write("job/secrets.py", "raise SystemExit('the wrong module')")
    begin = "import sys; sys.path.pop(0); from multiring._cli import main; sys.exit(main(sys.argv[1:]))"
    words = ["run", "--hosts", "host0:1,host1:1", sys.executable, "-c", "print('well')"]
    try:
        done = hosts.run(0, [sys.executable, "-c", begin, *words], HOME / "job")
    finally:
        for host in hosts.lab.hosts:
            hosts.as_root(host, f"rm {HOME}/secrets.py {HOME}/job/secrets.py")
    assert done.stdout.count("well") == 2, done.stderr


def test_the_secret_is_in_no_command_line_or_environment_or_file_of_others(hosts: SshHosts) -> None:
    given = "b7e151628aed2a6abf7158809cf4f3c7"
    hosts.write("show.py", secret_search.SHOW)
    words = [*RUN, "--hosts", "host0:1,host1:1,host2:1", "show.py", "/none"]
    process = hosts.start(0, words, MULTIRING_SECRET=given)
    assert process.stdout is not None
    secrets = (given, secret_shown(process.stdout.readline()))
    for number in range(3):
        for secret in secrets:  # in environments that only the user can read
            assert hosts.places_of(secret, number, "-", str(UID)) == []
    assert hosts.places_of(given, 0, "-") != []  # the search finds what is there
    process.terminate()
    told = b"".join(process.communicate(timeout=240)).decode()
    assert not any(secret in told for secret in secrets)
    nothing_left(hosts)
    for number in range(3):
        for secret in secrets:
            assert hosts.places_of(secret, number, "--left", "-") == []


def test_horovodrun_takes_a_port_and_a_key(hosts: SshHosts) -> None:
    hosts.as_root(hosts.lab.hosts[0], f"mv {HOME}/.ssh/id_ed25519 {HOME}/mykey")
    program = "import horovod.torch as hvd\nhvd.init()\nprint('rank', hvd.rank(), 'of', hvd.size(), flush=True)\n"
    hosts.write("horovod_program.py", program)
    words = ["horovodrun", "-np", "2", "-H", "host0:1,host1:1", "-p", "22"]
    command = [RUN[0], "-m", "multiring", *words, "-i", f"{HOME}/mykey", "python", "horovod_program.py"]
    try:
        done = hosts.run(0, command)
    finally:
        hosts.as_root(hosts.lab.hosts[0], f"mv {HOME}/mykey {HOME}/.ssh/id_ed25519")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0] rank 0 of 2", "[1] rank 1 of 2"]


def test_horovodrun_reads_a_hostfile(hosts: SshHosts) -> None:
    hosts.write("hosts", "host1 slots=1  # the first\nhost2:2\n", [0])
    hosts.write("where.py", "import os, horovod.torch as hvd\nhvd.init()\nprint(os.uname().nodename, flush=True)\n")
    words = ["horovodrun", "-np", "3", "-hostfile", "hosts", "python", "where.py"]
    done = hosts.run(0, [RUN[0], "-m", "multiring", *words])
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0] host1", "[1] host2", "[2] host2"]


def test_a_hosts_variable_is_the_ranks_if_the_user_sets_it(hosts: SshHosts) -> None:
    hosts.write("tell.py", "import os\nprint(os.environ['TMPDIR'], os.environ['HOME'], flush=True)\n")
    words = ["--hosts", "host0:1,host1:1", "--env", "TMPDIR=/dev/shm", "tell.py"]
    done = hosts.launch(*words, on=0, TMPDIR="/tmp")  # noqa: S108 -- of the launcher's host
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] /dev/shm {HOME}" for rank in (0, 1)], done.stderr


@pytest.mark.parametrize("time_out", [(), ("--env", "MULTIRING_WIRE_TIMEOUT_S=4")], ids=["", "short time-out"])
def test_a_killed_host_is_named_in_bounded_time(own_hosts: SshHosts, time_out: tuple[str, ...]) -> None:
    """Also if the other ranks fail long before the launcher counts the host as dead."""
    process = at_work(own_hosts, *time_out, "--hosts", "host0:1,host1:1,host2:1", ranks=3)
    began = time.monotonic()
    own_hosts.lab.apply(parse_fault(["kill", "host2"], own_hosts.lab.plan))
    _, err = process.communicate(timeout=240)
    assert time.monotonic() - began < 100  # the launcher allows 15 s of silence, and the kernel a quarter of an hour
    assert process.returncode == 137
    assert re.search(r"rank 2 \(pid \d+ on host2\) failed: its host was lost: .*", err.decode()), err.decode()
    nothing_left(own_hosts, 0, 1)


def test_a_dead_launchers_host_is_noticed(own_hosts: SshHosts) -> None:
    at_work(own_hosts, "--hosts", "host1:1,host2:1")
    own_hosts.lab.apply(parse_fault(["kill", "host0"], own_hosts.lab.plan))
    nothing_left(own_hosts, 1, 2)
