"""CUDA gradients in unusual places: sparse, beside the host's, on several streams, on a moved model; and on no device.

The last test counts what makes the caller's thread wait for the device.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tests.support.cuda_torch_ranks import run_cuda
from tests.support.device_training import HOST, batch, join, mean_loss, model_of, own_batch
from tests.support.ranks import Here
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

import multiring.torch as mt
from multiring.errors import MultiringError


def shared(model: nn.Module, **options: Any) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return mt.DistributedOptimizer(optimizer, model.named_parameters(), **options)


# ---- sparse gradients ----


def words() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Flatten(), nn.Linear(12, 3))


def by_hand(here: Here, device: torch.device, **options: Any) -> list[Tensor]:
    """Return the losses of steps by hand: the stand-ins have no arithmetic of sparse tensors on a device."""
    model, losses = words().to(device), []
    optimizer = shared(model, **options)
    for step in range(6):
        dice = torch.Generator().manual_seed(step * here.size + here.rank)
        inputs, targets = torch.randint(0, 10 - step, (8, 3), generator=dice), torch.randn(8, 3, generator=dice)
        loss = mean_loss(model, (inputs.to(device), targets.to(device)))
        loss.backward()
        optimizer.synchronize()
        losses.append(loss.detach().cpu())
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                assert parameter.grad.device == parameter.device
                parameter.sub_(dense(parameter.grad).to(device), alpha=0.1)
                parameter.grad = None
    return losses


def dense(gradient: Tensor) -> Tensor:
    if gradient.layout == torch.strided:
        return gradient
    assert gradient.is_coalesced()
    parts = gradient._indices().cpu(), gradient._values().cpu()
    return torch.sparse_coo_tensor(*parts, gradient.shape, check_invariants=True).to_dense()


def rows_of_dense(tensor: Tensor, dims: int) -> Tensor:
    found = tensor.detach().cpu().to_sparse(dims)
    parts = found.indices().to(tensor.device), found.values().to(tensor.device)
    return torch.sparse_coo_tensor(*parts, found.shape, is_coalesced=True, check_invariants=False)


def rows(here: Here) -> None:
    device = join(here)
    library: Any = torch.library.Library
    operators = library("aten", "IMPL")  # for this process
    operators.impl("_to_sparse.sparse_dim", rows_of_dense, "CUDA")
    cases: list[dict[str, Any]] = [{}, {"bucket_bytes": 64}, {"op": mt.Sum}, {"sparse_as_dense": True}]
    for options in cases:
        assert by_hand(here, device, **options) == by_hand(here, HOST, **options), options


def test_sparse_gradients() -> None:
    run_cuda(rows, devices=2)


# ---- a model on the host and on a device ----


class Divided(nn.Module):
    """A model whose middle is on another device than its ends."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.first, self.middle, self.last = nn.Linear(12, 16), nn.Linear(16, 16), nn.Linear(16, 3)
        self.middle.to(device)
        self.device = device

    def forward(self, inputs: Tensor) -> Tensor:
        found = torch.relu(self.first(inputs)).to(self.device)
        last: Tensor = self.last(torch.relu(self.middle(found)).cpu())
        return last


def losses_of_divided(here: Here, device: torch.device, **options: Any) -> list[float]:
    model, losses = Divided(device), []
    optimizer = shared(model, **options)
    for step in range(10):
        optimizer.zero_grad()
        loss = mean_loss(model, own_batch(here, step, "perceptron", HOST))
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def both(here: Here) -> None:
    device = join(here)
    low_rank = {"compression": mt.PowerSGD(rank=1), "bucket_bytes": 300}
    cases: list[dict[str, Any]] = [{}, {"bucket_bytes": 64}, {"groups": 2}, {"op": mt.Adasum}, low_rank]
    for options in cases:
        expected = losses_of_divided(here, HOST, **options)
        assert losses_of_divided(here, device, **options) == pytest.approx(expected, rel=1e-6), options


def test_a_model_on_the_host_and_on_a_device() -> None:
    run_cuda(both, devices=2)


def clipped(here: Here) -> None:
    """Clip a model on two devices, and a parameter of one number, whose type must stay."""
    device = join(here)
    found = []
    for places in ((HOST, HOST), (HOST, device), (device, device)):
        weights = [nn.Parameter(torch.ones(3, device=places[0])), nn.Parameter(torch.tensor(1.5, device=places[1]))]
        optimizer = mt.DistributedOptimizer(torch.optim.SGD(weights, lr=0.1))
        clipping = mt.clip_gradients(optimizer, 0.5)
        (weights[0].sum() * (1.0 + here.rank)).backward()  # type: ignore[no-untyped-call] # torch's own
        (weights[1] * 2.0).backward()  # type: ignore[no-untyped-call] # as above
        optimizer.step()
        assert weights[1].grad is not None
        assert weights[1].grad.dtype is torch.float32
        found.append([clipping.norm, *weights[0].tolist(), weights[1].item()])
    assert found[1] == pytest.approx(found[0], rel=1e-6)
    assert found[2] == pytest.approx(found[0], rel=1e-6)


def test_clipping_on_two_devices() -> None:
    run_cuda(clipped, devices=2)


# ---- devices that do not fit ----


def devices_that_do_not_fit(here: Here) -> None:
    device = join(here)
    with pytest.raises(MultiringError, match=r"on cuda") as differing:
        shared(model_of("perceptron", device if here.rank else HOST))
    assert "the ranks differ" in str(differing.value)
    with pytest.raises(MultiringError, match=r"0\.weight is on meta"):
        shared(model_of("perceptron", torch.device("meta")))
    for delays in (False, True):
        model = model_of("perceptron", HOST)
        optimizer = shared(model)
        if delays:
            mt.gradient_lag(optimizer)
        for step in range(2):
            take_step(here, model, optimizer, step, HOST)
        place = HOST
        if here.rank:  # only one rank moves its model
            model.to(place := device)
        before = [each.detach().clone() for each in model.parameters()]
        with pytest.raises(MultiringError, match=r"4\.bias is on cuda:\d now, and was on cpu when the Distributed"):
            take_step(here, model, optimizer, 2, place)
        for kept, weight in zip(before, model.parameters(), strict=True):
            assert torch.equal(kept, weight)


def train_on(model: nn.Module, optimizer: Any, pair: Any) -> None:
    optimizer.zero_grad()
    mean_loss(model, pair).backward()
    optimizer.step()


def moved_under_distribute(here: Here) -> None:
    device = join(here)
    given = model_of("perceptron", HOST)
    samples: Any = TensorDataset(*batch(0, here.size, "perceptron"))
    plain = torch.optim.SGD(given.parameters(), 0.1)
    model, optimizer, loader = mt.distribute(given, plain, DataLoader(samples, 2))
    batches = iter(loader)
    for _ in range(2):
        train_on(model, optimizer, next(batches))
    pair = next(batches)
    if here.rank:  # only one rank moves its model
        model.to(device)
        pair = [each.to(device) for each in pair]
    before = [each.detach().clone() for each in model.parameters()]
    with pytest.raises(MultiringError, match=r"is on cuda:\d now, and was on cpu"):
        train_on(model, optimizer, pair)
    for kept, weight in zip(before, model.parameters(), strict=True):
        assert torch.equal(kept, weight)


def test_a_model_that_is_moved_under_distribute() -> None:
    run_cuda(moved_under_distribute, devices=2)


def take_step(here: Here, model: nn.Module, optimizer: Any, step: int, device: torch.device) -> None:
    mean_loss(model, own_batch(here, step, "perceptron", device)).backward()
    optimizer.step()
    optimizer.zero_grad()


def test_devices_that_do_not_fit() -> None:
    run_cuda(devices_that_do_not_fit, devices=2)


# ---- streams ----


def losses_on_streams(here: Here, device: torch.device, *, uses_streams: bool) -> list[float]:
    """Train with every second step, and the middle layer of each step, on streams of their own."""
    model: Any = model_of("perceptron", device)
    optimizer = shared(model)
    stream_of: Any = torch.cuda.Stream
    streams: list[Any] = [stream_of() for _ in range(2)] if uses_streams else [torch.cuda.current_stream()] * 2
    losses = []
    for step in range(8):
        pair = own_batch(here, step, "perceptron", device)
        before = torch.cuda.current_stream()
        stream = streams[0] if step % 2 else before
        stream.wait_stream(before)
        with torch.cuda.stream(stream):
            optimizer.zero_grad()
            inner = model[:2](pair[0])
            streams[1].wait_stream(stream)
            with torch.cuda.stream(streams[1]):
                inner = model[2:4](inner)
            stream.wait_stream(streams[1])
            loss = (model[4](inner) - pair[1]).square().mean()
            loss.backward()
            optimizer.step()
        before.wait_stream(stream)
        losses.append(loss.detach())
    return [float(each) for each in losses]


def on_streams(here: Here) -> None:
    device = join(here)
    expected = losses_on_streams(here, device, uses_streams=False)
    with warnings_of_torch():
        assert losses_on_streams(here, device, uses_streams=True) == expected


@contextmanager
def warnings_of_torch() -> Iterator[None]:
    """Ignore torch's warning of parameters whose gradients come on changing streams."""
    import warnings  # noqa: PLC0415

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The AccumulateGrad node's stream")
        yield


@pytest.mark.parametrize("seed", [1, 2])
def test_streams_of_the_program(seed: int) -> None:
    run_cuda(on_streams, devices=2, standin={"seed": seed})


# ---- waits for the device ----


class Waits(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch's
    """Records what makes a thread of the program wait for a device, without our threads."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch's
        self.found: list[str] = []

    def __torch_dispatch__(self, operator: Any, _types: Any, arguments: Any = (), options: Any = None) -> Any:
        options = options or {}
        if any(isinstance(each, Tensor) and each.is_cuda for each in arguments) and self.waits(
            str(operator), arguments, options
        ):
            self.note(str(operator))
        return operator(*arguments, **options)

    @staticmethod
    def waits(name: str, arguments: Any, options: dict[str, Any]) -> bool:
        if any(each in name for each in ("_local_scalar_dense", "nonzero", "aten.equal", "coalesce")):
            return True
        to_host = ("_to_copy" in name and str(options.get("device")) == "cpu") or (
            "aten.copy_" in name and arguments[0].is_cpu
        )
        return to_host and not (options.get("non_blocking") or (len(arguments) > 2 and arguments[2]))

    def note(self, name: str) -> None:
        if not threading.current_thread().name.startswith("multiring bucket"):
            self.found.append(name)


def count_waits(here: Here, patch: pytest.MonkeyPatch) -> dict[str, list[int]]:
    device = join(here)
    waits = Waits()
    for kind, name in ((torch.cuda.Event, "synchronize"), (torch.cuda.Stream, "synchronize")):
        real = getattr(kind, name)

        def synchronize(self: Any, real: Any = real) -> None:
            waits.note("synchronize")
            real(self)

        patch.setattr(kind, name, synchronize)
    found, kept = {}, []  # a deleted bucket waits for its copies
    cases: dict[str, dict[str, Any]] = {
        "plain": {},
        "passes": {"backward_passes_per_step": 2},
        "powersgd": {"compression": mt.PowerSGD(rank=1)},
        "adasum": {"op": mt.Adasum},
        "lag": {},
        "clip": {},
    }
    for name, options in cases.items():
        model = model_of("perceptron", device)
        optimizer = shared(model, **options)
        if name == "lag":
            mt.gradient_lag(optimizer)
        if name == "clip":
            mt.clip_gradients(optimizer, 0.5)
        by_step = []
        kept.append(optimizer)
        for step in range(5):
            pairs = [own_batch(here, step, "perceptron", device) for _ in range(1 + (name == "passes"))]
            waits.found.clear()
            with waits:
                for pair in pairs:
                    mean_loss(model, pair).backward()
                optimizer.step()
                optimizer.zero_grad()
            by_step.append(len(waits.found))
        found[name] = by_step
    with waits:
        model(pairs[0][0]).sum().item()
    assert waits.found  # the watch itself works
    return found


def waits_of_steps(here: Here) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name, by_step in count_waits(here, patch).items():
            # The first two steps compare the ranks' gradients and parameters.
            assert by_step[2:] == [0, 0, 0], (name, by_step)
            assert sum(by_step[:2]) <= 3, (name, by_step)


def test_steps_do_not_wait_for_the_device() -> None:
    run_cuda(waits_of_steps, devices=2)
