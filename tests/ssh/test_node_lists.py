"""`multiring run` in a job of PBS or LSF: variables and files of the test, on hosts with a real sshd."""

import pytest
from tests.support.ssh_hosts import HOME, RUN, SshHosts

SAY = """
import os, multiring
group = multiring.init()
group.barrier()
print(f"rank {group.rank} of {group.size} on {os.uname().nodename}", flush=True)
"""
# A program with the name of the scheduler's own launcher must not be needed, nor be started.
NOT_OURS = "#!/bin/sh\necho $0 was started >&2\nexit 9\n"
PLACES = ["host0", "host0", "host1"]
FILE = str(HOME / "nodes")
JOBS = {
    "PBS": {"PBS_JOBID": "7.server", "PBS_NODEFILE": FILE},
    "LSF with a file": {"LSB_JOBID": "7", "LSB_DJOB_HOSTFILE": FILE, "LSB_MCPU_HOSTS": "host2 9"},
    "LSF with a variable": {"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "host0 2 host1 1"},
}


def in_job(hosts: SshHosts, job: str) -> list[str]:
    """Write the programs, and return the words before a command in the script of a job."""
    hosts.write("say.py", SAY)
    hosts.write("nodes", "\n".join(PLACES) + "\n")
    for name in ("blaunch", "pbsdsh"):
        hosts.write(f"bin/{name}", NOT_OURS)
    for host in hosts.lab.hosts:
        hosts.as_root(host, f"chmod 755 {HOME}/bin/*")
    return ["env", f"PATH={HOME}/bin:/usr/bin:/bin", *(f"{name}={value}" for name, value in JOBS[job].items())]


@pytest.mark.parametrize("job", JOBS)
def test_the_hosts_of_the_allocation_are_used(hosts: SshHosts, job: str) -> None:
    done = hosts.run(0, [*in_job(hosts, job), *RUN, "say.py"])
    assert done.returncode == 0, done.stderr
    expected = [f"[{rank}] rank {rank} of 3 on {host}" for rank, host in enumerate(PLACES)]
    assert sorted(done.stdout.splitlines()) == expected
    assert "multiring: ranks on host0:2,host1:1, the hosts of this allocation; --here uses this one only" in done.stderr
    assert "was started" not in done.stderr


def test_here_uses_this_host_only_and_a_lost_host_of_the_list_is_named(hosts: SshHosts) -> None:
    words = in_job(hosts, "PBS")
    here = hosts.run(0, [*words, *RUN, "--here", "-n", "2", "say.py"])
    assert sorted(here.stdout.splitlines()) == [f"[{rank}] rank {rank} of 2 on host0" for rank in (0, 1)], here.stderr
    hosts.write("nodes", "host0\nhost9\n")
    lost = hosts.run(0, [*words, *RUN, "say.py"])
    assert lost.returncode != 0
    assert "host9" in lost.stderr
