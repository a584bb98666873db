"""`multiring horovodrun` with schedules of Horovod's elastic tests: with torch, TensorFlow and Keras.

benchmarks/evidence/horovod/schedules.py runs all of them with each framework.
"""

import pytest
from tests.support.horovod_schedules import SCHEDULES
from tests.support.ssh_hosts import SshHosts

CASES = [
    ("torch", "hosts_are_added_and_removed"),
    ("torch", "one_rank_is_killed"),
    ("torch", "too_few_ranks_are_left"),
    ("torch", "hosts_are_exchanged_beyond_the_limit_of_resets"),
    ("torch", "a_host_that_fails_twice_pauses"),
    ("tensorflow", "hosts_are_added_and_removed"),
    ("keras", "hosts_are_added_and_removed"),
]


@pytest.mark.parametrize(("framework", "schedule"), CASES)
def test_a_schedule_ends_as_the_page_says(hosts: SshHosts, framework: str, schedule: str) -> None:
    SCHEDULES[schedule](hosts, framework)
