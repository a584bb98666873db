"""DistributedOptimizer, with each of its options, trains CUDA parameters exactly as parameters of the host."""

from typing import Any

import pytest
import torch
from tests.support.cuda_torch_ranks import run_cuda
from tests.support.device_training import HOST, Halves, Program, join
from tests.support.ranks import Here

import multiring.torch as mt

FEEDBACK: dict[str, Any] = {"compression": "int8", "error_feedback": True}
LOW_RANK: dict[str, Any] = {"compression": mt.PowerSGD(rank=1)}
PROGRAMS = {
    "buckets": {
        "plain": Program(),
        "adam": Program("adam"),
        "sum": Program(op=mt.Sum),
        "small": Program(bucket_bytes=64),
        "groups": Program(groups=2),
        "predivided": Program(gradient_predivide_factor=2.0),
        "passes": Program(passes=3),
    },
    "forms": {
        "fp16": Program(compression=mt.Compression.fp16),
        "bf16": Program(compression="bf16", error_feedback=True),
        "int8": Program(compression="int8"),
        "powersgd": Program(**LOW_RANK),
        "own": Program(compression=Halves),
        "adasum": Program(op=mt.Adasum),
        "own adasum": Program("adam", op=mt.Adasum, compression=Halves),
        "adasum scaler": Program(op=mt.Adasum, helpers="scaler"),
    },
    "helpers": {
        "clip": Program(helpers="clip"),
        "torch clip": Program(helpers="torch clip"),
        "scaler": Program(helpers="scaler"),
        "scaler clip": Program(helpers="scaler, torch clip"),
        "fp16": Program(precision="fp16"),
        "bf16": Program(precision="bf16"),
        "noise": Program(helpers="noise"),
        "noise of feedback": Program(helpers="noise", **FEEDBACK),
        "average": Program(helpers="average"),
    },
    "lag": {
        "plain": Program(helpers="lag", bucket_bytes=600),
        "passes": Program(passes=2, helpers="lag"),
        "feedback": Program(helpers="lag", **FEEDBACK),
        "powersgd": Program(helpers="lag", bucket_bytes=600, **LOW_RANK),
        "scaler": Program(helpers="lag, scaler"),
        "all": Program(helpers="lag, clip, noise, larc, average", precision="fp16"),
    },
    "optimizers": {
        "lars": Program("lars"),
        "lamb": Program("lamb"),
        "muon": Program("muon"),
        "larc": Program(helpers="larc"),
        "larc adam": Program("adam", helpers="larc"),
    },
}


def compare(here: Here, kind: str) -> None:
    device = join(here)
    for name, program in PROGRAMS[kind].items():
        expected = program.losses(here, HOST, 8)
        assert program.losses(here, device, 8) == pytest.approx(expected, rel=1e-6, nan_ok=True), name
    torch.cuda.synchronize()


@pytest.mark.parametrize("kind", PROGRAMS)
def test_options(kind: str) -> None:
    run_cuda(compare, kind, hosts=1, devices=2)


@pytest.mark.parametrize(("hosts", "devices"), [(1, 1), (2, 1)])
def test_shapes(hosts: int, devices: int) -> None:
    run_cuda(compare, "forms", hosts=hosts, devices=devices)
