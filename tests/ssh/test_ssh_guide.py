"""The commands of docs/guide_ssh.md, as they stand, on two hosts that are called a and b."""

import re

from tests.support.ssh_hosts import HOME, ROOT, SshHosts

TRAIN = """
import numpy as np, multiring
group = multiring.init()
total = np.ones(1)
group.all_reduce(total)
print(f"rank {group.rank}: {total[0]:g}", flush=True)
"""


def test_the_guides_commands_do_what_it_says(hosts: SshHosts) -> None:
    page = (ROOT / "docs" / "guide_ssh.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```sh\n(.*?)```", page, re.DOTALL)
    commands = [line for block in blocks for line in block.splitlines() if line]
    assert len(commands) == 5
    for host in hosts.lab.hosts:
        for name, alias in (("host0", "a"), ("host1", "b")):
            hosts.as_root(host, f"echo $(getent hosts {name} | cut -d' ' -f1) {alias} >>/etc/hosts")
    hosts.as_root(hosts.lab.hosts[0], "hostname a")
    hosts.as_root(hosts.lab.hosts[1], "hostname b")
    hosts.as_root(hosts.lab.hosts[0], f"sed -n 's/^host1 /b /p' {HOME}/.ssh/known_hosts >>{HOME}/.ssh/known_hosts")
    hosts.write("train.py", TRAIN)
    for command in commands:
        done = hosts.run(0, ["/bin/bash", "-ec", command])
        assert done.returncode == 0, (command, done.stderr)
        if "--hosts" in command:
            assert sorted(done.stdout.splitlines()) == [f"[{rank}] rank {rank}: 4" for rank in range(4)]
        if "true" in command:
            assert done.stdout == done.stderr == ""
    assert hosts.read(0, "logs/rank-3.out") == "rank 3: 4\n"
    for number in range(2):
        assert hosts.wait_until_gone(number) == []
