"""Parameters, optimizer states, checkpoints, objects, metrics and batch norm with models on devices."""

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.cuda_torch_ranks import SMALL_SHAPES, run_cuda
from tests.support.ranks import Here
from torch import Tensor, nn

import multiring.torch as mt
from multiring.errors import ArgumentError, MismatchError


def here_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


class Net(nn.Module):
    """A model with all kinds of state."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), mt.SyncBatchNorm(8), nn.ReLU(), nn.Flatten())
        self.head = nn.Linear(8 * 16, 4)
        self.register_buffer("hidden", torch.randn(3), persistent=False)
        self.told = torch.zeros(2)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the outputs."""
        found: Tensor = self.head(self.body(inputs))
        return found

    def get_extra_state(self) -> Tensor:
        """Return `told`."""
        return self.told

    def set_extra_state(self, state: Tensor) -> None:
        """Set `told`."""
        self.told = state


def on_host(value: Any) -> Any:
    """Return `value` with each tensor as its kind of device and its values."""
    if isinstance(value, Tensor):
        return value.device.type, value.tolist()
    if isinstance(value, dict):
        return {key: on_host(each) for key, each in value.items()}
    return [on_host(each) for each in value] if isinstance(value, list | tuple) else value


def whole(model: nn.Module) -> Any:
    return on_host({**model.state_dict(), "hidden": model.hidden})


def is_on(device: torch.device, model: nn.Module) -> bool:
    return all(each.device == device for each in (*model.parameters(), *model.buffers()))


def train(model: Any, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        inputs = torch.randn(4, 8 * 16, generator=torch.Generator().manual_seed(step)).to(here_device())
        model.head(inputs).square().mean().backward()
        optimizer.step()


OPTIMIZERS: dict[str, Any] = {
    "adam": lambda parameters, rank: torch.optim.Adam(parameters, lr=0.1 * (rank + 1)),
    "sgd": lambda parameters, rank: torch.optim.SGD(parameters, lr=0.1 * (rank + 1), momentum=0.9),
    "capturable": lambda parameters, rank: torch.optim.Adam(
        parameters, lr=torch.tensor(0.1 * (rank + 1), device=here_device()), capturable=True
    ),
}


def share(here: Here) -> None:
    mt.init()
    device = here_device()
    torch.manual_seed(here.rank)
    model = Net().to(device)
    model.told = torch.full((2,), float(here.rank), device=device)
    mt.broadcast_parameters(model, root_rank=0)
    assert is_on(device, model)
    assert model.told.device == device
    assert mt.allgather_object(whole(model)) == [whole(model)] * here.size
    for make in OPTIMIZERS.values():
        optimizer = make(model.parameters(), here.rank)
        if here.rank == 0:
            train(model, optimizer, 2)
        mt.broadcast_optimizer_state(optimizer, root_rank=0)
        state = on_host(optimizer.state_dict())
        assert mt.allgather_object(state) == [state] * here.size
        mt.broadcast_parameters(list(model.named_parameters()), root_rank=0)
        train(model, optimizer, 1)  # the state works with the parameters
        assert mt.allgather_object(whole(model)) == [whole(model)] * here.size
    if here.size > 1:
        mixed = nn.Linear(2, 2).to(device if here.rank else "cpu")
        with pytest.raises(MismatchError, match="on cuda"):
            mt.broadcast_parameters(mixed.state_dict(), root_rank=0)
        with pytest.raises(MismatchError, match="on cuda"):
            mt.broadcast_optimizer_state(torch.optim.SGD(mixed.parameters(), lr=0.1), root_rank=0)


@pytest.mark.parametrize(("hosts", "devices"), SMALL_SHAPES)
def test_all_ranks_get_the_roots_state(hosts: int, devices: int) -> None:
    run_cuda(share, hosts=hosts, devices=devices)


def save_and_load(here: Here, place: str) -> None:
    mt.init()
    device = here_device()
    for name, make in OPTIMIZERS.items():
        torch.manual_seed(3)
        model = Net().to(device)
        optimizer = make(model.parameters(), 0)
        train(model, optimizer, 2)
        path = f"{place}/{name}"
        mt.save(path, model=model, optimizer=optimizer, beside=torch.arange(5, device=device), epoch=3)
        torch.manual_seed(100 + here.rank)
        other = Net().to(device)
        later = make(other.parameters(), 5)
        found = mt.load(path, model=other, optimizer=later)
        assert (found["epoch"], found["beside"].tolist()) == (3, [0, 1, 2, 3, 4])
        assert is_on(device, other)
        assert whole(other) == whole(model)
        assert on_host(later.state_dict()) == on_host(optimizer.state_dict())
        on_cpu = Net()
        mt.load(path, model=on_cpu)  # a checkpoint has no devices
        assert is_on(torch.device("cpu"), on_cpu)
        assert all(
            torch.equal(one, two.cpu()) for one, two in zip(on_cpu.parameters(), model.parameters(), strict=True)
        )


@pytest.mark.parametrize(("hosts", "devices"), [(1, 1), (1, 2)])
def test_checkpoints(hosts: int, devices: int, tmp_path: Path) -> None:
    run_cuda(save_and_load, str(tmp_path), hosts=hosts, devices=devices)


def objects_and_metrics(here: Here) -> None:
    mt.init()
    device, rank, size = here_device(), here.rank, here.size
    tied = torch.full((2,), float(rank), device=device)
    storage: Any = torch.storage
    storage._reset_warn_typed_storage_removal()  # torch warns once of the deprecated type that its pickles use
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = mt.broadcast_object({"a": [tied, tied[:1]], "b": nn.Linear(1, 1).to(device)}, size - 1)
    assert found["a"][0].device == device
    assert next(found["b"].parameters()).device == device
    assert found["a"][0].tolist() == [size - 1.0] * 2
    assert found["a"][1].tolist() == [size - 1.0]
    assert [each.item() for each in mt.allgather_object(torch.tensor(rank, device=device))] == list(range(size))
    metrics = {"loss": torch.tensor(2.0 + rank, device=device), "each": torch.ones(3, device=device)}
    weights = [1.0 + each for each in range(size)]
    wanted = sum(weight * (2.0 + each) for each, weight in enumerate(weights)) / sum(weights)
    mean = mt.mean(metrics, weight=1.0 + rank)
    assert mean["loss"] == pytest.approx(wanted)
    assert mean["each"].tolist() == [1.0] * 3
    rows = mt.gather({"out": torch.full((1 + rank,), float(rank), device=device)})["out"]
    assert rows.device == device
    assert rows.tolist() == [float(each) for each in range(size) for _ in range(1 + each)]
    model = Net().to(device)
    state: Any = mt.elastic.TorchState(model=model, optimizer=torch.optim.Adam(model.parameters()), tensor=tied)
    state.sync()
    assert state.tensor.device == device
    assert state.tensor.tolist() == [0.0, 0.0]
    saved = whole(model)
    with torch.no_grad():
        model.head.weight.zero_()
    state.restore()
    assert whole(model) == saved
    assert is_on(device, model)


@pytest.mark.parametrize(("hosts", "devices"), SMALL_SHAPES)
def test_objects_metrics_and_elastic_states(hosts: int, devices: int) -> None:
    run_cuda(objects_and_metrics, hosts=hosts, devices=devices)


def normalise(here: Here) -> None:
    mt.init()
    torch.manual_seed(5)
    model = Net()
    moved = copy.deepcopy(model).to(here_device())
    for step in range(3):
        torch.manual_seed(10 * step + here.rank)
        inputs = torch.randn(3 + here.rank, 3, 4, 4)
        found = []
        for each, place in ((model, "cpu"), (moved, here_device())):
            each.zero_grad()
            given = inputs.clone().to(place).requires_grad_()
            each(given).square().sum().backward()
            norm = each.body[1]
            found.append([given.grad, norm.running_mean, norm.running_var, *(p.grad for p in each.parameters())])
        for one, two in zip(*found, strict=True):
            assert torch.allclose(one, two.cpu(), rtol=1e-4, atol=1e-5)
    if here.size == 1:
        return
    with pytest.raises(ArgumentError, match="more than 1 value per channel"):
        mt.SyncBatchNorm(2).to(here_device())(torch.ones(max(0, 1 - here.rank), 2, device=here_device()))


@pytest.mark.parametrize(("hosts", "devices"), SMALL_SHAPES)
def test_sync_batch_norm_is_as_on_the_host(hosts: int, devices: int) -> None:
    run_cuda(normalise, hosts=hosts, devices=devices)
