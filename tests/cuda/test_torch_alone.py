"""torch's own ProcessGroupNCCL, DDP, GradScaler and FSDP2 train on the stand-ins as in one process."""

import copy
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.cuda_torch_ranks import SHAPES, run_cuda
from tests.support.ranks import Here
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

STEPS = 20
ROWS = 8  # of a rank


def join(here: Here, place: str) -> torch.device:
    """Initialize torch's group of all ranks; return this rank's device."""
    gc.freeze()
    device = torch.device("cuda", torch.cuda.current_device())
    dist.init_process_group(
        "nccl", init_method=f"file://{place}", rank=here.rank, world_size=here.size, device_id=device
    )
    return device


def leave() -> None:
    torch.cuda.synchronize()
    dist.destroy_process_group()


def collectives(here: Here, place: str) -> None:
    device, size, rank = join(here, place), here.size, here.rank
    total = torch.full((1000,), float(rank + 1), device=device)
    dist.all_reduce(total)
    assert (total.cpu() == size * (size + 1) / 2).all()
    work = dist.all_reduce(ones := torch.ones(1 << 16, device=device), async_op=True)
    work.wait()
    assert (ones == size).all()
    parts = [torch.empty(3, device=device) for _ in range(size)]
    dist.all_gather(parts, torch.full((3,), float(rank), device=device))
    assert [part[0].item() for part in parts] == list(range(size))
    own = torch.empty(4, device=device, dtype=torch.bfloat16)
    rows = torch.arange(4 * size, device=device, dtype=torch.bfloat16)
    dist.reduce_scatter_single(own, rows, op=dist.ReduceOp.AVG)
    assert own.tolist() == [4 * rank + each for each in range(4)]
    found = torch.empty(size, device=device)
    dist.all_to_all_single(found, torch.arange(size, device=device) + 10.0 * rank)
    assert found.tolist() == [rank + 10.0 * each for each in range(size)]
    got = torch.empty(5, device=device)
    sent = torch.full((5,), float(rank), device=device)
    if size > 1:
        pair = [
            dist.P2POp(dist.isend, sent, (rank + 1) % size),
            dist.P2POp(dist.irecv, got, (rank - 1) % size),
        ]
        for each in dist.batch_isend_irecv(pair):
            each.wait()
        assert (got == (rank - 1) % size).all()
    dist.barrier(dist.new_group(list(range(size))))
    dist.broadcast(total, src=size - 1)
    leave()


@pytest.mark.parametrize(("hosts", "devices"), SHAPES)
def test_collectives(hosts: int, devices: int, tmp_path: Path) -> None:
    run_cuda(collectives, str(tmp_path / "meet"), hosts=hosts, devices=devices)


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 3))


def convolution() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 3))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "perceptron": (perceptron, (12,)),
    "convolution": (convolution, (1, 4, 4)),
}


def batch(step: int, size: int, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    dice = torch.Generator().manual_seed(step)
    return torch.randn(ROWS * size, *shape, generator=dice), torch.randn(ROWS * size, 3, generator=dice)


def train(model: nn.Module, here: Here, name: str, device: torch.device, optimizer: str) -> list[float]:
    """Return the losses of the rank's part of each batch; of the whole batch on the host."""
    optimizers: dict[str, Any] = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}
    step_of = optimizers[optimizer](model.parameters(), lr=0.02)
    scaler = torch.amp.GradScaler(device.type, init_scale=128.0)
    losses = []
    own = slice(None) if device.type == "cpu" else slice(here.rank * ROWS, (here.rank + 1) * ROWS)
    for step in range(STEPS):
        inputs, targets = (each[own].to(device) for each in batch(step, here.size, MODELS[name][1]))
        step_of.zero_grad()
        loss = (model(inputs) - targets).square().mean()
        scaler.scale(loss).backward()
        scaler.step(step_of)
        scaler.update()
        losses.append(loss.detach())
    return [each.item() for each in losses]


def compare(here: Here, place: str, name: str, kind: str, optimizer: str) -> None:
    device = join(here, place)
    torch.manual_seed(5)
    alone = MODELS[name][0]()
    model: nn.Module = copy.deepcopy(alone).to(device)
    if kind == "ddp":
        model = DistributedDataParallel(model, device_ids=[device], bucket_cap_mb=0.001)
    else:
        for layer in model.children():
            if any(True for _ in layer.parameters()):
                fully_shard(layer)
        fully_shard(model)
    own = torch.tensor(train(model, here, name, device, optimizer), device=device)
    dist.all_reduce(own, op=dist.ReduceOp.AVG)
    expected = torch.tensor(train(alone, here, name, torch.device("cpu"), optimizer))
    assert torch.allclose(own.cpu(), expected, rtol=1e-6), (own.cpu() - expected).abs().max()
    leave()


@pytest.mark.parametrize(("hosts", "devices"), [(1, 2), (2, 1)])
@pytest.mark.parametrize(("kind", "optimizer"), [("ddp", "sgd"), ("fsdp", "adamw")])
def test_training(kind: str, optimizer: str, hosts: int, devices: int, tmp_path: Path) -> None:
    run_cuda(compare, str(tmp_path / "meet"), "perceptron", kind, optimizer, hosts=hosts, devices=devices)


def test_a_model_with_convolution_and_batch_norm(tmp_path: Path) -> None:
    run_cuda(compare, str(tmp_path / "meet"), "convolution", "ddp", "sgd", hosts=1, devices=1)


def on_another_device(here: Here) -> None:  # noqa: ARG001
    """Operators on tensors of another device than the current one, and on lists of several devices' tensors."""
    torch.cuda.set_device(0)
    devices = torch.device("cuda", 0), torch.device("cuda", 1)
    for number in range(12):
        value = 3.0 + number

        def filled(device: torch.device, value: float = value) -> Tensor:
            return torch.full((100,), value, device=device)

        for first, second in (devices, devices[::-1]):
            assert float((filled(second) * 2)[3]) == 2 * value
            assert float((filled(second) * 2).double().sum()) == 200 * value
            assert float((filled(first) * 2).to(second).sum()) == 200 * value
            both: Any = [filled(first), filled(second)]
            torch._foreach_mul_(both, 2.0)
            assert [float(each.double().sum()) for each in both] == [200 * value] * 2
            optimizer = torch.optim.SGD([nn.Parameter(filled(each)) for each in (first, second)], lr=1.0, momentum=0.9)
            for each in optimizer.param_groups[0]["params"]:
                each.grad = torch.ones(100, device=each.device)
            optimizer.step()
            found = [float(each.detach().double().sum()) for each in optimizer.param_groups[0]["params"]]
            assert found == [100 * (value - 1)] * 2


def test_operators_on_another_device_than_the_current_one() -> None:
    run_cuda(on_another_device, hosts=1, devices=1, standin={"devices": 2, "delay_us": 3000})
