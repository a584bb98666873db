"""Parameters on several devices of one process train as on the host: random models, optimizers and ways of clipping."""

import random
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from tests.standin.torch_devices import CYCLES_PER_US
from tests.support.cuda_torch_ranks import run_cuda
from tests.support.device_training import HOST, ROWS, join
from tests.support.ranks import Here
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import multiring.torch as mt
import multiring_torch
from multiring._frontend import follow_ups
from multiring._runtime.engines.nccl_communicator import NcclCommunicator
from multiring.torch.collectives import by_nccl

STEPS = 8
WIDTHS = (3, 8, 17)


class Pipe(nn.Module):
    """Layers on given devices; the values move from one to the next."""

    def __init__(self, widths: list[int], places: list[torch.device]) -> None:
        super().__init__()
        self.places = places
        self.layers = nn.ModuleList(
            [nn.Linear(*pair).to(place) for pair, place in zip(pairwise(widths), places, strict=True)]
        )

    def forward(self, values: Tensor) -> Tensor:
        for layer, place in zip(self.layers, self.places, strict=True):
            values = torch.tanh(layer(values.to(place)))
        return values


def train(here: Here, seed: int, devices: tuple[torch.device, torch.device]) -> list[float]:
    """Return the losses of a random training, the norms of its gradients and sums of its parameters."""
    dice = random.Random(seed)  # noqa: S311 -- the same on all ranks
    layers = dice.randint(2, 5)
    widths = [dice.choice(WIDTHS) for _ in range(layers + 1)]
    places = [dice.choice(devices) for _ in range(layers)]
    places[0], places[-1] = dice.choice((devices, devices[::-1]))
    torch.manual_seed(seed)
    model = Pipe(widths, places)
    plain: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if dice.random() < 0.5:
        plain = torch.optim.Adam(model.parameters(), lr=0.01)
    optimizer: Any = mt.DistributedOptimizer(
        plain, model.named_parameters(), bucket_bytes=dice.choice((200, 1000, 1 << 20))
    )
    limit, clips = dice.choice((0.01, 0.1, 1.0)), dice.choice(("multiring", "multiring", "torch", ""))
    clipping = mt.clip_gradients(optimizer, limit) if clips == "multiring" else None
    sets_to_none = dice.random() < 0.5
    found: list[Any] = []
    for step in range(STEPS):
        made = torch.Generator().manual_seed(1000 * seed + step)
        own = slice(here.rank * ROWS, (here.rank + 1) * ROWS)
        inputs, targets = (torch.randn(ROWS * here.size, each, generator=made)[own] for each in (widths[0], widths[-1]))
        optimizer.zero_grad(set_to_none=sets_to_none)
        loss = (model(inputs) - targets.to(places[-1])).square().mean()
        loss.backward()
        if clips == "torch":
            optimizer.synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), limit)
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            optimizer.step()
        found += [loss.detach()] if clipping is None else [loss.detach(), clipping.norm]
    found += [each.detach().double().sum() for each in model.parameters()]
    return [float(each) for each in found]


def compare(here: Here, seeds: list[int], path: str) -> None:
    join(here, check_first_steps=False, device_path=path)
    own, other = (torch.device("cuda", (here.rank + each) % 2) for each in range(2))
    for seed in seeds:
        found, wanted = train(here, seed, (own, other)), train(here, seed, (HOST, HOST))
        assert found == pytest.approx(wanted, rel=1e-5, abs=1e-7), seed


@pytest.mark.parametrize(("ranks", "path"), [(1, "staged"), (2, "staged"), (2, "nccl")])
def test_training(ranks: int, path: str) -> None:
    standin = {"devices": 2, "delay_us": 1500}
    run_cuda(compare, list(range(10 * ranks, 10 * ranks + 8)), path, hosts=1, devices=ranks, standin=standin)


def share(here: Here, place: str) -> None:
    """Average the gradients of two devices by one BucketSharing."""
    join(here)
    distributed: Any = torch.distributed
    multiring_torch.register()
    distributed.init_process_group("multiring", init_method=f"file://{place}", rank=here.rank, world_size=here.size)
    sharing = mt.BucketSharing()
    for _ in range(3):
        for index in range(2):
            device = torch.device("cuda", (here.rank + index) % 2)
            model: Any = DistributedDataParallel(nn.Linear(3 + index, 2).to(device))
            model.register_comm_hook(sharing, mt.allreduce_hook)
            for step in range(3):
                model.zero_grad()
                inputs = torch.full((2, 3 + index), float(here.rank + step), device=device)
                model(inputs).sum().backward()
                wanted = 2 * (step + (here.size - 1) / 2)
                assert bool((model.module.weight.grad == wanted).all()), (index, step)
    distributed.destroy_process_group()


def test_the_hook(tmp_path: Path) -> None:
    run_cuda(share, str(tmp_path / "meet"), devices=2)


# ---- all-reduces of a tensor on another device than NCCL's ----


def reduce_elsewhere(here: Here) -> Counter[str]:
    """Reduce tensors of NCCL's device, and on the last rank of another one; return what NCCL was asked to do."""
    by_nccl.LEAST_BYTES = 0
    follow_ups.BEHIND, follow_ups.EQUAL = 4, 2
    mt.init()
    own, other = (torch.device("cuda", (here.rank + each) % here.size) for each in range(2))
    while set(mt.allgather_object(mt.device_path())) == {"undecided"}:
        mt.allreduce(torch.ones(2, device=own))
    for _ in range(10):  # until the ranks expect that all can use NCCL
        mt.allreduce(torch.ones(2, device=own))
    place = other if here.rank == here.size - 1 else own
    total, found = sum(range(1, here.size + 1)), Counter[str]()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("put", "abort"):
            patch.setattr(NcclCommunicator, name, counting(found, name, getattr(NcclCommunicator, name)))
        for number in range(6):
            torch.cuda._sleep(2000 * CYCLES_PER_US)  # on the current device, which is `own`
            with torch.cuda.device(place):
                torch.cuda._sleep(2000 * CYCLES_PER_US)
                x = torch.full((1000,), float(number), device=place) + (here.rank + 1)
                handle = mt.allreduce_async(x, op="sum")
                more = mt.grouped_allreduce_async([x * 2, torch.full((7,), 1.0, device=own)], op="sum")
                del x
                mt.allreduce_(changed := torch.full((10,), 1.0 + here.rank, device=place), op="sum")
                first, (second, third) = mt.synchronize(handle), mt.synchronize(more)
                assert [each.device for each in (first, second, third)] == [place, place, own]
                wanted = float(here.size * number + total)
                assert (first + 1).eq(wanted + 1).all()
                assert (second + 1).eq(2 * wanted + 1).all()
                assert third.eq(float(here.size)).all()
                assert changed.eq(float(total)).all()
    return found


def counting(found: Counter[str], name: str, call: Any) -> Any:
    def counted(*arguments: Any) -> Any:
        found[name] += 1
        return call(*arguments)

    return counted


def test_a_tensor_of_another_device_goes_through_nccl() -> None:
    assert run_cuda(reduce_elsewhere, devices=2) == [Counter(put=18)] * 2
