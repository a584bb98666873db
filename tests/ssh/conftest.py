"""Tests with real sshd on the virtual hosts of a lab: make ssh-test, or pytest tests/ssh as root."""

import os
from collections.abc import Iterator

import pytest
from tests.support.ssh_hosts import SSHD, SshHosts, ssh_hosts

_can_run = os.geteuid() == 0 and SSHD.exists()
# `make ssh-test` installs OpenSSH's server and fails where it cannot.
collect_ignore_glob = [] if _can_run else ["test_*.py"]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshHosts]:
    """Three hosts with sshd, for tests that leave them as they were."""
    with ssh_hosts(3, tmp_path_factory.mktemp("ssh")) as made:
        yield made


@pytest.fixture
def own_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshHosts]:
    """Three hosts with sshd, for a test that breaks one."""
    with ssh_hosts(3, tmp_path_factory.mktemp("ssh")) as made:
        yield made
