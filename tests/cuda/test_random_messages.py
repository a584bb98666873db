"""Random programs of messages with device tensors, some of them wrong.

benchmarks/evidence/torch/random_messages.py has more.
"""

from pathlib import Path

import pytest
from tests.support.cuda_torch_ranks import run_cuda
from tests.support.message_programs import run_message_programs


@pytest.mark.parametrize(("hosts", "devices"), [(1, 2), (1, 4), (2, 1)])
def test_random_messages(hosts: int, devices: int, tmp_path: Path) -> None:
    standin = {"delay_us": 1500, "devices": max(devices, 2)}
    run_cuda(run_message_programs, [10 + devices], str(tmp_path), hosts=hosts, devices=devices, standin=standin)
