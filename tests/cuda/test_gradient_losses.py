"""Training on CUDA devices has the losses of one process, by DistributedOptimizer, `distribute`, DDP and FSDP2."""

import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.cuda_torch_ranks import TRAINING_SHAPES, run_cuda
from tests.support.device_training import HOST, OPTIMIZERS, ROWS, Halves, batch, join, mean_loss, model_of
from tests.support.ranks import Here
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import multiring.torch as mt
from multiring import is_initialized

STEPS = 20
# A rank's fp16 gradients are larger than those of one process, because the mean is over fewer samples. The scale
# alternates between one that is far too large for both, every seventh step, and one that is small enough for both.
LARGE_SCALE, FACTOR, INTERVAL = 1.5 * 2.0**20, 128.0, 6


class Training:
    """A model in training, on one process or on ranks."""

    def __init__(self, model: nn.Module, optimizer: Any, precision: str) -> None:
        device = next(model.parameters()).device
        self.model, self.optimizer, self.device = model, optimizer, device
        self._type = {"": None, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
        self._scaler = torch.amp.GradScaler(
            device.type,
            init_scale=LARGE_SCALE,
            growth_factor=FACTOR,
            backoff_factor=1 / FACTOR,
            growth_interval=INTERVAL,
            enabled=precision == "fp16",
        )
        self.scales: list[float] = []

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Take a step; return the loss."""
        self.optimizer.zero_grad()
        with nullcontext() if self._type is None else torch.autocast(self.device.type, self._type):
            loss = mean_loss(self.model, (inputs.to(self.device), targets.to(self.device)))
        self._scaler.scale(loss).backward()
        self._scaler.step(self.optimizer)
        self._scaler.update()
        self.scales.append(self._scaler.get_scale())
        return loss.detach()  # type: ignore[no-any-return] # torch's


def of_one_process(here: Here, name: str, precision: str, device: torch.device) -> tuple[list[float], list[float]]:
    """Return the losses and the loss scales of one process on `device`, with the batches of all ranks."""
    model = model_of(name, device)
    training = Training(model, OPTIMIZERS["sgd"](model.parameters()), precision)
    return [float(training.step(*batch(step, here.size, name))) for step in range(STEPS)], training.scales


def model_for_ranks(name: str, device: torch.device) -> nn.Module:
    model: nn.Module = mt.convert_sync_batchnorm(model_of(name, device))
    return model


def join_once(here: Here) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if is_initialized() else join(here)


def by_optimizer(here: Here, name: str, precision: str, place: str) -> tuple[Tensor, list[float]]:  # noqa: ARG001
    model = model_for_ranks(name, join_once(here))
    mt.broadcast_parameters(model, root_rank=0)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    mt.broadcast_optimizer_state(optimizer, root_rank=0)
    return of_ranks(
        here, name, Training(model, mt.DistributedOptimizer(optimizer, model.named_parameters()), precision)
    )


def by_distribute(here: Here, name: str, precision: str, place: str) -> tuple[Tensor, list[float]]:  # noqa: ARG001
    device = join(here)
    rows = [batch(step, here.size, name) for step in range(STEPS)]
    samples = TensorDataset(*(torch.cat(parts) for parts in zip(*rows, strict=True)))
    model = model_for_ranks(name, device)
    made = mt.distribute(model, OPTIMIZERS["sgd"](model.parameters()), DataLoader(samples, ROWS * here.size))
    training = Training(made[0], made[1], precision)
    return torch.stack([training.step(*pair) for pair in made[2]]), training.scales


def of_ranks(here: Here, name: str, training: Training) -> tuple[Tensor, list[float]]:
    losses = []
    for step in range(STEPS):
        own = slice(here.rank * ROWS, (here.rank + 1) * ROWS)
        losses.append(training.step(*(each[own] for each in batch(step, here.size, name))))
    return torch.stack(losses), training.scales


def meet(here: Here, place: str, backend: str) -> torch.device:
    """Initialize torch's group, whose CUDA tensors go through `backend`; return this rank's device."""
    device = join_once(here)
    backends = f"cpu:multiring,cuda:{backend}"
    dist.init_process_group(backends, init_method=f"file://{place}", rank=here.rank, world_size=here.size)
    return device


def by_ddp(here: Here, name: str, precision: str, place: str, **sharing: Any) -> tuple[Tensor, list[float]]:
    device = meet(here, place, "multiring" if sharing.pop("uses_backend", False) else "nccl")
    model = model_for_ranks(name, device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of unusual process groups
        whole = DistributedDataParallel(
            model, device_ids=[device], bucket_cap_mb=0.002, gradient_as_bucket_view=sharing.pop("views", True)
        )
    if sharing.pop("has_hook"):
        whole.register_comm_hook(mt.BucketSharing(**sharing), mt.allreduce_hook)
    return of_ranks(here, name, Training(whole, OPTIMIZERS["sgd"](whole.parameters()), precision))


def by_hook(here: Here, name: str, precision: str, place: str) -> tuple[Tensor, list[float]]:
    return by_ddp(here, name, precision, place, has_hook=True)


def by_nccl(here: Here, name: str, precision: str, place: str) -> tuple[Tensor, list[float]]:
    return by_ddp(here, name, precision, place, has_hook=False)


def by_backend(here: Here, name: str, precision: str, place: str) -> tuple[Tensor, list[float]]:
    return by_ddp(here, name, precision, place, has_hook=False, uses_backend=True)


def by_fsdp(here: Here, name: str, precision: str, place: str) -> tuple[Tensor, list[float]]:
    model = model_for_ranks(name, meet(here, place, "multiring"))
    for layer in model.children():
        if any(True for _ in layer.parameters()):
            fully_shard(layer)
    fully_shard(model)
    return of_ranks(here, name, Training(model, OPTIMIZERS["sgd"](model.parameters()), precision))


WAYS = {
    "optimizer": by_optimizer,
    "distribute": by_distribute,
    "hook": by_hook,
    "backend": by_backend,
    "fsdp": by_fsdp,
}


def compare(here: Here, way: str, name: str, place: str) -> None:
    own, _ = WAYS[way](here, name, "", place)
    expected, _ = of_one_process(here, name, "", HOST)
    assert mt.allreduce(own).cpu().tolist() == pytest.approx(expected, rel=1e-6)
    leave()


def leave() -> None:
    torch.cuda.synchronize()
    if dist.is_initialized():
        dist.destroy_process_group()


def compare_distances(here: Here, precision: str, place: str) -> None:
    """Compare with the distance that torch's own DDP with NCCL has from one process."""
    device = join(here)  # autocast has other types on the host
    expected, expected_scales = of_one_process(here, "perceptron", precision, device)
    far = {}
    for way in (by_nccl, by_hook, by_optimizer):
        own, scales = way(here, "perceptron", precision, place + way.__name__)
        found = mt.allreduce(own.double()).cpu()
        far[way.__name__] = float((found - torch.tensor(expected)).abs().max())
        assert scales == expected_scales, (way, scales, expected_scales)
        leave()
    if precision == "fp16":
        grown = [step for step, scale in enumerate(expected_scales) if scale == LARGE_SCALE]
        assert grown == [INTERVAL, 2 * INTERVAL + 1]  # the steps after these, and the first, were skipped
    assert far["by_hook"] <= 1.5 * far["by_nccl"], far
    assert far["by_optimizer"] <= 1.5 * far["by_nccl"], far


@pytest.mark.parametrize(("hosts", "devices"), TRAINING_SHAPES)
@pytest.mark.parametrize("way", WAYS)
def test_losses(way: str, hosts: int, devices: int, tmp_path: Path) -> None:
    run_cuda(compare, way, "perceptron", str(tmp_path / "meet"), hosts=hosts, devices=devices)


@pytest.mark.parametrize(("hosts", "devices"), TRAINING_SHAPES)
@pytest.mark.parametrize("way", WAYS)
def test_convolution_and_batch_norm(way: str, hosts: int, devices: int, tmp_path: Path) -> None:
    run_cuda(compare, way, "convolution", str(tmp_path / "meet"), hosts=hosts, devices=devices)


@pytest.mark.parametrize(("hosts", "devices"), TRAINING_SHAPES)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_autocast(precision: str, hosts: int, devices: int, tmp_path: Path) -> None:
    run_cuda(compare_distances, precision, str(tmp_path / "meet"), hosts=hosts, devices=devices)


def hook_options(here: Here, place: str) -> None:
    cases: list[dict[str, Any]] = [
        {"views": False},
        {"compression": "bf16"},
        {"compression": "int8", "error_feedback": True},
        {"compression": mt.PowerSGD(rank=1)},
        {"compression": Halves},
    ]
    device = join(here)
    for number, options in enumerate(cases):
        dist.init_process_group(
            "cpu:multiring,cuda:nccl", init_method=f"file://{place}{number}", rank=here.rank, world_size=here.size
        )
        found = []
        for place_of in (HOST, device):
            sharing = mt.BucketSharing(**{key: value for key, value in options.items() if key != "views"})
            model = model_of("perceptron", place_of)
            whole = DistributedDataParallel(
                model, bucket_cap_mb=0.002, gradient_as_bucket_view=bool(options.get("views", True))
            )
            whole.register_comm_hook(sharing, mt.allreduce_hook)
            training = Training(whole, OPTIMIZERS["sgd"](whole.parameters()), "")
            losses, _ = of_ranks(here, "perceptron", training)
            sharing.load_state_dict(sharing.state_dict(model), model)
            found.append(losses.tolist())
        assert found[1] == pytest.approx(found[0], rel=1e-6), options
        torch.cuda.synchronize()
        dist.destroy_process_group()


def test_options_of_the_hook(tmp_path: Path) -> None:
    run_cuda(hook_options, str(tmp_path / "meet"), hosts=1, devices=2)
