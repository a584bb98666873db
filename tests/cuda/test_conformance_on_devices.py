"""The torch adapter passes the conformance suite, which has three ranks, with device tensors on several hosts.

benchmarks/evidence/torch/tests_on_devices.py runs it on one host.
"""

import pytest
from tests.support.conforming import jobs, on_torch
from tests.support.cuda_torch_ranks import HAS_ALL, run_cuda
from tests.support.default_device import once, put_tensors_on_device
from tests.support.device_use import COPIED, HELD
from tests.support.ranks import Here

from multiring.adapters import conformance

HOSTS = ((2, 1), (1, 1, 1)) if HAS_ALL else ((2, 1),)  # the ranks of each


def conform(here: Here) -> tuple[list[tuple[str, str, str]], set[str]]:
    told: set[str] = set()
    put_tensors_on_device(once(told.add))
    _, _, results = jobs.suite(here, on_torch.__name__)
    return results, told


@pytest.mark.parametrize("hosts", HOSTS, ids=str)
def test_conforms(hosts: tuple[int, ...]) -> None:
    found = run_cuda(conform, hosts=hosts, deadline_s=400)
    for results, told in found:
        assert [check for check, _, _ in results] == list(conformance.CHECKS)
        assert [(check, text) for check, outcome, text in results if outcome != "passed"] == []
        assert told == {HELD, COPIED}
