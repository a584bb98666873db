"""A process that ends while operations of tensors on devices are under way ends as its program does."""

import os
import secrets
import signal
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
from tests.support.cuda_torch_ranks import HAS_ALL

PROGRAM = """
import os, signal, sys, time
from pathlib import Path
import torch
import multiring.torch as mt

way = sys.argv[1]
mt.init()
device = mt.local_device()
torch.cuda.set_device(device)
small, large = torch.ones(5, device=device), torch.ones(1 << 16, device=device)
wanted, until = os.environ["MULTIRING_DEVICE_PATH"], time.monotonic() + 240
while wanted == "nccl":  # the ranks decide beside the program
    mt.allreduce(large)
    ready = mt.allgather_object(mt.device_path())
    if set(ready) == {wanted}:
        break
    assert time.monotonic() < until, ready
torch.manual_seed(0)
model = torch.nn.Linear(30, 30).to(device)
optimizer = mt.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
for _ in range(3):
    optimizer.zero_grad()
    model(torch.ones(4, 30, device=device)).sum().backward()
    optimizer.step()
optimizer.zero_grad()
torch.cuda._sleep(2000 * 20000)  # 100 ms: what follows is under way when the program ends
kept = [mt.allreduce_async(each) for each in (small, large) * 4]
model(torch.ones(4, 30, device=device)).sum().backward()
print("ending", flush=True)
# A rank that ends in another way than by success fails what the other one is still doing, so both get here first.
Path(sys.argv[2], os.environ["MULTIRING_RANK"]).touch()
while not Path(sys.argv[2], str(1 - mt.rank())).exists() and time.monotonic() < until + 60:
    time.sleep(0.001)
if way == "sys.exit":
    sys.exit(3)
if way == "exception":
    raise RuntimeError("of the program")
if way == "os._exit":
    os._exit(4)
if way == "Ctrl-C":
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)
"""
CODES = {"end": 0, "sys.exit": 3, "exception": 1, "os._exit": 4, "Ctrl-C": -signal.SIGINT}
SAMPLE = [("staged", "end"), ("nccl", "exception"), ("nccl", "end"), ("staged", "Ctrl-C"), ("nccl", "os._exit")]
CASES = list(product(("staged", "nccl"), CODES)) if HAS_ALL else SAMPLE


@pytest.mark.parametrize(("path", "way"), CASES)
def test_a_process_ends_as_its_program_does(path: str, way: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    place = {
        "MULTIRING_SIZE": "2",
        "MULTIRING_RENDEZVOUS": f"@{secrets.token_hex(16)}",
        "MULTIRING_DEVICE_PATH": path,
        "STANDIN_DEVICES": "2",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.standin", str(program), way, str(tmp_path)],
            env={**os.environ, **place, "MULTIRING_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [each.communicate(timeout=300)[0] for each in ranks]
    finally:
        for each in ranks:
            each.kill()
    assert [each.returncode for each in ranks] == [CODES[way]] * 2, outputs
    for output in outputs:
        assert "ending" in output
        assert "Fatal Python error" not in output, output
        assert ("of the program" in output) == (way == "exception"), output
