"""`multiring doctor --hosts` checks hosts by ssh, also if some do not answer."""

import json
import sys

from tests.support.ssh_hosts import SshHosts

DOCTOR = (sys.executable, "-m", "multiring", "doctor", "--need-shm", "0")
RATES = ("slow-host", "slow-interface", "slow-link")


def test_hosts_are_checked_and_one_that_does_not_answer_is_a_finding(hosts: SshHosts) -> None:
    done = hosts.run(0, [*DOCTOR, "--hosts", "host0:2,host1:1,host2:1,absent:1", "--json"])
    report = json.loads(done.stdout)
    # These links have no limit, so other work on this machine makes them unequal; the lab's tests judge rates.
    found = {(each["kind"], each["where"]) for each in report["findings"] if each["kind"] not in ("busy", *RATES)}
    assert found == {("silent", "absent")}, report["findings"]
    assert done.returncode == report["code"] == 1
    assert [(host["name"], host["ranks"]) for host in report["hosts"]] == [("host0", 2), ("host1", 1), ("host2", 1)]
    assert len([pair for pair in report["pairs"] if pair["bytes_per_s"]]) == 6
    for number in range(3):
        assert hosts.wait_until_gone(number) == []


def test_without_any_host_there_is_a_report(hosts: SshHosts) -> None:
    done = hosts.run(0, [*DOCTOR, "--hosts", "absent,gone"])
    assert done.returncode == 1
    assert "silent (likely): absent: " in done.stdout
    assert "silent (likely): gone: " in done.stdout
    assert "2 findings: 0 hosts" in done.stdout
