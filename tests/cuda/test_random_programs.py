"""Random programs of collectives on device tensors, against NumPy.

benchmarks/evidence/torch/random_on_devices.py has more.
"""

import pytest
from tests.support.cuda_torch_ranks import run_cuda
from tests.support.device_programs import run_programs


@pytest.mark.parametrize(("hosts", "devices"), [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2)])
def test_random_programs(hosts: int, devices: int) -> None:
    standin = {"delay_us": 1500, "devices": max(devices, 2)}
    run_cuda(run_programs, [hosts, 10 + devices], hosts=hosts, devices=devices, standin=standin)
