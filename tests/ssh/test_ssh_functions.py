"""`horovod.run(hosts=...)`: a function on the ranks of hosts that ssh reaches; results and errors come back."""

import json
import re
import signal
from typing import Any

import pytest
from tests.support.ssh_hosts import HOME, SshHosts

from multiring.lab import parse_fault

# The functions are in a file of their own that all hosts have, and others in the script, which only host 0 has.
LIBRARY = """
import os, time
import numpy as np
import multiring

class TwoWordsError(Exception):
    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")

def total(base, *, factor):
    import horovod.torch as hvd
    hvd.init()
    group = multiring.init()
    summed = np.array([base * factor + group.rank])
    group.all_reduce(summed)
    return hvd.rank(), float(summed[0]), os.uname().nodename

def large(array):
    return array + int(os.environ["MULTIRING_RANK"])

def fail(kind):
    group = multiring.init()
    if group.rank == 2:
        if kind == "two words":
            raise TwoWordsError("salt", "pepper")
        if kind == "lock":
            import threading
            return threading.Lock()
        if kind == "exit":
            raise SystemExit(7)
        if kind == "killed":
            os.kill(os.getpid(), 9)
        raise ZeroDivisionError("rank two divides")
    if kind == "beside large results":
        return np.ones(20_000_000)  # 160 MB
    open(f"/tmp/at-work-{group.rank}", "w").close()
    time.sleep(1000)
"""
SCRIPT = """
import hashlib, json, sys, time
import numpy as np
from multiring.horovod import run
import library

def of_the_script(word):
    return word.upper()

options = json.loads(sys.argv[2])
started = time.monotonic()
def told(call):
    try:
        return {"result": call()}
    except Exception as error:
        cause = error.__cause__
        return {"error": type(error).__name__, "text": str(error), "cause": cause and repr(cause)}

def large():
    given = np.arange(4_000_000, dtype=np.int64)
    results = run(library.large, (given,), **options)
    return [bool(np.array_equal(each, given + rank)) for rank, each in enumerate(results)]

jobs = {
    "total": lambda: run(library.total, (1.0,), {"factor": 2.0}, **options),
    "script": lambda: run(of_the_script, ("word",), **options),
    "large": large,
}
for name in sys.argv[1].split(","):
    job = jobs.get(name, lambda: run(library.fail, (name,), **options))
    print("TOLD", json.dumps(told(job)), flush=True)
"""
ON_TWO = {"num_proc": 4, "hosts": "host0:2,host1:2"}


def run_on(hosts: SshHosts, options: dict[str, Any], *names: str) -> list[dict[str, Any]]:
    """Run jobs of the script on host 0 and return what each of them told; nothing may be left on any host."""
    hosts.write("library.py", LIBRARY)
    hosts.write("script.py", SCRIPT, [0])
    done = hosts.run(0, ["python", "script.py", ",".join(names), json.dumps(options)])
    told = [json.loads(line[5:]) for line in done.stdout.splitlines() if line.startswith("TOLD ")]
    assert len(told) == len(names), done.stderr
    for number in range(3):
        assert hosts.wait_until_gone(number) == []
    assert hosts.as_root(hosts.lab.hosts[0], "ls /tmp | grep -c multiring-run || true") == "0\n"
    return told


def test_results_come_back_from_all_ranks(hosts: SshHosts) -> None:
    total, script, large = run_on(hosts, ON_TWO, "total", "script", "large")
    assert "result" in total, total
    assert total["result"] == [[rank, 14.0, f"host{rank // 2}"] for rank in range(4)]
    assert script["result"] == ["WORD"] * 4
    assert large["result"] == [True] * 4


def test_errors_come_back_with_their_cause(hosts: SshHosts) -> None:
    kinds = ("raised", "two words", "lock", "exit", "killed", "beside large results")
    raised, two, lock, left, killed, beside = run_on(hosts, ON_TWO, *kinds)
    assert raised["error"] == two["error"] == lock["error"] == left["error"] == killed["error"] == "LaunchError"
    assert "rank 2 raised\nTraceback" in raised["text"]
    assert raised["cause"] == "ZeroDivisionError('rank two divides')"
    assert "TwoWordsError: salt and pepper" in two["text"]
    assert two["cause"] is None
    assert re.search(r"rank 2 raised\nTraceback[\s\S]*pickle", lock["text"])
    assert "SystemExit: 7" in left["text"]
    assert "exit code 137" in killed["text"]
    assert beside["cause"] == "ZeroDivisionError('rank two divides')", beside


def test_a_port_a_key_and_a_hostfile(hosts: SshHosts) -> None:
    here = hosts.lab.hosts[0]
    hosts.write("hosts", "host1 slots=1\nhost2 slots=2\n", [0])
    hosts.as_root(here, f"mv {HOME}/.ssh/id_ed25519 {HOME}/mykey")
    options = {"num_proc": 2, "hostfile": "hosts", "ssh_port": 22}
    with_key = {**options, "ssh_identity_file": f"{HOME}/mykey"}
    try:
        (refused,) = run_on(hosts, options, "total")
        (total,) = run_on(hosts, with_key, "total")
        (closed,) = run_on(hosts, {**with_key, "ssh_port": 23}, "total")
    finally:
        hosts.as_root(here, f"mv {HOME}/mykey {HOME}/.ssh/id_ed25519")
    assert "result" in total, total
    assert total["result"] == [[0, 5.0, "host1"], [1, 5.0, "host2"]]
    assert refused["error"] == closed["error"] == "LaunchError"
    assert re.search("host[12]: no agent runs there: ", refused["text"])
    assert "Permission denied" in refused["text"]
    assert "port 23: Connection refused" in closed["text"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_driver_that_ends_leaves_nothing(hosts: SshHosts, number: int) -> None:
    hosts.write("library.py", LIBRARY)
    hosts.write("script.py", SCRIPT, [0])
    words = ["python", "script.py", "wait", json.dumps({"num_proc": 2, "hosts": "host1:1,host2:1"})]
    forget_work(hosts)
    driver = hosts.start(0, words)
    for host, rank in ((1, 0), (2, 1)):
        at_work = f"for _ in $(seq 2000); do [ -e /tmp/at-work-{rank} ] && exit; sleep 0.1; done; exit 1"
        hosts.as_root(hosts.lab.hosts[host], at_work)
    driver.send_signal(number)
    driver.communicate(timeout=240)
    assert driver.returncode != 0
    for place in range(3):
        assert hosts.wait_until_gone(place) == []


def forget_work(hosts: SshHosts) -> None:
    """Remove the marks of tests before, which may have had the same hosts."""
    for each in hosts.lab.hosts:
        hosts.as_root(each, "rm -f /tmp/at-work-*")


def test_a_killed_host_is_named(own_hosts: SshHosts) -> None:
    hosts = own_hosts
    forget_work(hosts)
    hosts.write("library.py", LIBRARY)
    hosts.write("script.py", SCRIPT, [0])
    driver = hosts.start(
        0,
        ["python", "script.py", "wait", json.dumps({"num_proc": 2, "hosts": "host0:1,host1:1"})],
    )
    at_work = "for _ in $(seq 2000); do [ -e /tmp/at-work-1 ] && exit; sleep 0.1; done; exit 1"
    hosts.as_root(hosts.lab.hosts[1], at_work)
    hosts.lab.apply(parse_fault(["kill", "host1"], hosts.lab.plan))
    out, err = driver.communicate(timeout=240)
    told = json.loads(out.decode().partition("TOLD ")[2])
    assert told["error"] == "LaunchError"
    assert "rank 1" in err.decode()
    assert "its host was lost" in err.decode()
    assert hosts.wait_until_gone(0) == []
