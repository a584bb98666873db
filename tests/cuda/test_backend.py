"""The backend "multiring" of torch.distributed with CUDA tensors, beside NumPy's sums and one process."""

import copy
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from tests.cuda.test_torch_alone import MODELS, train
from tests.support.cuda_torch_ranks import SMALL_SHAPES, TRAINING_SHAPES, report_of_cuda, run_cuda
from tests.support.faults import kill
from tests.support.ranks import Here
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import multiring_torch
from multiring.torch.c10d.aborts import Aborts

dist: Any = torch.distributed  # typed Any, because torch's stubs are incomplete
multiring_torch.register()  # torch loads the entry points of installed packages only

SEEDS = range(5)
SOON_S = 20.0  # with a loaded machine; the lost rank would sleep for 60 s


def join(here: Here, place: str, timeout_s: float = 60.0) -> torch.device:
    """Initialize torch's group of all ranks; return this rank's device."""
    store = dist.FileStore(place, here.size)
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group("multiring", store=store, rank=here.rank, world_size=here.size, timeout=timeout)
    return torch.device("cuda", torch.cuda.current_device())


def same(found: Tensor, wanted: Any) -> None:
    torch.testing.assert_close(found.cpu(), wanted, rtol=1e-5, atol=1e-5)


# ---- collectives ----


def collectives(here: Here, place: str) -> None:
    device, size, rank = join(here, place), here.size, here.rank
    assert dist.group.WORLD is not None
    assert [each.type for each in dist.group.WORLD._device_types] == ["cpu", "cuda"]
    dice = torch.Generator().manual_seed(0)
    for _ in range(4):
        count = int(torch.randint(1, 5000, (1,), generator=dice))
        all_of = [torch.randn(count, generator=dice) for _ in range(size)]
        own = all_of[rank].to(device)
        reduced = own.clone()
        reduced.mul_(2)
        work = dist.all_reduce(reduced, async_op=True)
        work.wait()
        same(reduced + 1, sum(all_of) * 2 + 1)
        parts = [torch.empty(count, device=device) for _ in range(size)]
        dist.all_gather(parts, own)
        for part, wanted in zip(parts, all_of, strict=True):
            same(part, wanted)
        whole = torch.empty(size * count, device=device)
        dist.all_gather_single(whole, own)
        same(whole, torch.cat(all_of))
        dist.reduce_scatter_single(own, whole * (rank + 1))
        same(own, all_of[rank] * (size * (size + 1) // 2))
        dist.broadcast(own, size - 1)
        same(own, all_of[-1] * (size * (size + 1) // 2))
        exchanged = torch.empty(size, device=device)
        dist.all_to_all_single(exchanged, torch.arange(size, device=device) + 10.0 * rank)
        same(exchanged, torch.tensor([rank + 10.0 * each for each in range(size)]))
    gaps = torch.arange(12.0, device=device).view(3, 4).t()
    dist.all_reduce(gaps)
    same(gaps, torch.arange(12.0).view(3, 4).t() * size)
    empty = torch.empty(0, device=device)
    dist.all_reduce(empty)
    root = [torch.empty(3, device=device) for _ in range(size)] if rank == size - 1 else None
    dist.gather(torch.full((3,), float(rank), device=device), root, dst=size - 1)
    for number, each in enumerate(root or ()):
        same(each, torch.full((3,), float(number)))
    many = [torch.full((each + 1,), float(rank), device=device) for each in range(3)]
    with dist._coalescing_manager(device=device, async_ops=True) as manager:
        for each in many:
            dist.all_reduce(each)
    manager.wait()
    for number, each in enumerate(many):
        same(each, torch.full((number + 1,), float(sum(range(size)))))
    dist.destroy_process_group()


@pytest.mark.parametrize(("hosts", "devices"), SMALL_SHAPES)
def test_collectives(hosts: int, devices: int, tmp_path: Path) -> None:
    run_cuda(collectives, str(tmp_path / "meet"), hosts=hosts, devices=devices)


def messages(here: Here, place: str) -> None:
    """A message may be waited for before an earlier one, which comes only because of that."""
    device, other = join(here, place), 1 - here.rank
    sent, got = torch.full((7,), float(here.rank), device=device), torch.empty(7, device=device)
    pair = [dist.P2POp(dist.isend, sent, other), dist.P2POp(dist.irecv, got, other)]
    for each in dist.batch_isend_irecv(pair):
        each.wait()
    same(got, torch.full((7,), float(other)))
    if here.rank == 0:
        answer = torch.empty(1, device=device)
        work = dist.irecv(answer, 1)
        for value in (1.0, 2.0):
            dist.isend(torch.full((1,), value, device=device), 1).wait()
        work.wait()
        assert answer.item() == 3
    else:
        numbers = torch.empty(2, 1, device=device)
        for each in numbers:
            dist.irecv(each, 0).wait()
        dist.send(numbers.sum().view(1), 0)
    dist.destroy_process_group()


def test_messages(tmp_path: Path) -> None:
    run_cuda(messages, str(tmp_path / "meet"))


def in_order(here: Here, place: str) -> None:
    """Host tensors and device tensors in one group, in the program's order; results that nobody waits for."""
    device, total = join(here, place), sum(range(here.size))
    for number in range(30):
        there, work = torch.full((5000,), float(here.rank + number), device=device), None
        work = dist.all_reduce(there, async_op=True)
        beside = torch.full((3,), float(here.rank))
        dist.all_reduce(beside)
        assert (beside == total).all()
        if number % 3:
            del work
        del there
        torch.randn(5000, device=device)  # may get the memory of `there`
        last = torch.full((5000,), float(here.rank * number), device=device)
        dist.all_reduce(last)
        same(last, torch.full((5000,), float(number * total)))
    futures = []
    for number in range(8):
        work = dist.all_reduce(torch.full((500,), float(here.rank + number), device=device), async_op=True)
        futures.append(work.get_future().then(lambda done: done.value()[0] * 2))
    for number, future in enumerate(futures):
        same(future.wait(), torch.full((500,), 2.0 * (number * here.size + total)))
    work = dist.all_reduce(torch.ones(3, device=device), async_op=True)
    work.wait()
    (ended,) = work.get_future().value()  # the future of an operation that has ended is complete
    same(ended, torch.full((3,), float(here.size)))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("seed", SEEDS)
def test_order_and_lifetime(seed: int, tmp_path: Path) -> None:
    run_cuda(in_order, str(tmp_path / "meet"), standin={"seed": seed})


# ---- training ----


def training(here: Here, place: str, name: str, kind: str) -> None:
    device = join(here, place)
    torch.manual_seed(5)
    alone = MODELS[name][0]()
    model: nn.Module = copy.deepcopy(alone).to(device)
    if kind == "fsdp":
        for layer in model.children():
            if any(True for _ in layer.parameters()):
                fully_shard(layer)
        fully_shard(model)
    else:
        wrapped: Any = DistributedDataParallel(model, device_ids=[device], bucket_cap_mb=0.001)
        if kind == "hook":
            wrapped.register_comm_hook(None, default_hooks.allreduce_hook)
        model = wrapped
    own = torch.tensor(train(model, here, name, device, "sgd"), device=device)
    dist.all_reduce(own, op=dist.ReduceOp.AVG)
    expected = torch.tensor(train(alone, here, name, torch.device("cpu"), "sgd"))
    torch.testing.assert_close(own.cpu(), expected, rtol=1e-6, atol=0)
    dist.destroy_process_group()


@pytest.mark.parametrize("kind", ["ddp", "hook", "fsdp"])
@pytest.mark.parametrize(("hosts", "devices"), TRAINING_SHAPES)
def test_training(kind: str, hosts: int, devices: int, tmp_path: Path) -> None:
    run_cuda(training, str(tmp_path / "meet"), "perceptron", kind, hosts=hosts, devices=devices)


def test_a_model_with_convolution_and_batch_norm(tmp_path: Path) -> None:
    run_cuda(training, str(tmp_path / "meet"), "convolution", "ddp", hosts=1, devices=1)


def nested_callbacks(here: Here, place: str) -> None:
    """PowerSGD's hook waits for a collective in the callback of another collective's future."""
    device = join(here, place)
    torch.manual_seed(1)
    network = nn.Sequential(nn.Linear(40, 330), nn.ReLU(), nn.Linear(330, 3)).to(device)
    model: Any = DistributedDataParallel(network, device_ids=[device])
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(6):
        optimizer.zero_grad()
        model(torch.randn(4, 40).to(device) + here.rank).square().mean().backward()
        optimizer.step()
    sums = torch.stack([each.detach().double().sum() for each in network.parameters()])
    other = sums.clone()
    dist.broadcast(other, 0)
    assert torch.equal(sums, other)
    dist.destroy_process_group()


def test_powersgd_hook(tmp_path: Path) -> None:
    run_cuda(nested_callbacks, str(tmp_path / "meet"))


# ---- failures ----


def refused(here: Here, place: str) -> None:
    """One rank passes wrong arguments: all ranks raise, and the group stays in step."""
    device = join(here, place)
    two = torch.ones(2, device=device)
    wrong: list[Any] = [
        lambda: dist.all_gather([torch.empty(3, device=f"cuda:{each}") for each in range(2)], torch.ones(3).to(device)),
        lambda: dist.all_reduce(torch.ones(1, device=device).expand(4)),
        lambda: dist.all_gather([torch.empty(3, device=device) for _ in range(2)], torch.ones(4, device=device)),
        lambda: dist.all_reduce(two, dist.ReduceOp.BAND),
    ]
    for call in wrong:
        with pytest.raises(RuntimeError):
            call() if here.rank else dist.all_reduce(two)
        dist.all_reduce(one := torch.ones(1, device=device))
        assert one.item() == 2
    # Only the sums count, not where they are.
    mixed = torch.ones(2, device=device if here.rank else "cpu")
    dist.all_reduce(mixed)
    assert mixed.tolist() == [2, 2]
    with pytest.raises(
        RuntimeError, match=r"the ranks do not agree: rank 0: .* shape \(2,\).* rank 1: .* shape \(3,\)"
    ):
        dist.all_reduce(torch.ones(2 + here.rank, device=device))
    dist.destroy_process_group()


def test_wrong_arguments(tmp_path: Path) -> None:
    run_cuda(refused, str(tmp_path / "meet"))


def lose_one(here: Here, place: str) -> None:
    device = join(here, place)
    tensor = torch.ones(1000, device=device)
    dist.all_reduce(tensor)
    here.reach("ready")
    if here.rank:
        time.sleep(60)
    began_s = time.monotonic()
    with pytest.raises(RuntimeError, match="rank 1 died"):
        dist.all_reduce(tensor)
    assert time.monotonic() - began_s < SOON_S
    assert torch.ones(3, device=device).sum().item() == 3  # the process lives on
    dist.destroy_process_group()


def test_a_death_is_named(tmp_path: Path) -> None:
    first = report_of_cuda(lose_one, str(tmp_path / "meet"), faults=[kill(1).at("ready")]).outcomes[0]
    assert first.error is None, first.output


def wait_for_the_late(here: Here, place: str) -> None:
    device = join(here, place, timeout_s=1.0)
    if here.rank == 0:
        with pytest.raises(RuntimeError, match="timed out: nothing has come from rank 1 within 1 s"):
            dist.all_reduce(torch.ones(10, device=device))
    else:
        time.sleep(3)
    dist.destroy_process_group()


def test_a_time_out_names_the_rank(tmp_path: Path) -> None:
    run_cuda(wait_for_the_late, str(tmp_path / "meet"))


def abort(here: Here, place: str, late_s: float) -> None:
    """A rank aborts the group and ends. The others name the abort, even if their thread for messages is `late_s`."""
    device = join(here, place)
    hear = Aborts.hear

    def hear_late(self: Aborts, notice: Any) -> None:
        time.sleep(late_s)
        hear(self, notice)

    with_late: Any = Aborts
    with_late.hear = hear_late
    tensor = torch.ones(10, device=device)
    dist.all_reduce(tensor)
    group: Any = dist.group.WORLD
    if here.rank:
        group.abort()
        return
    with pytest.raises(RuntimeError, match=r"rank 1 aborted the group|was aborted by rank 1"):  # during, or before
        dist.all_reduce(tensor)


def use_what_has_ended(here: Here, place: str) -> None:
    """An operation on a group that has ended raises, and does not wait for the group's threads."""
    device = join(here, place)
    group: Any = dist.group.WORLD
    dist.all_reduce(torch.ones(10, device=device))
    group.shutdown()
    for where in ("cpu", device):
        with pytest.raises(RuntimeError, match="make it anew"):
            group.allreduce([torch.ones(10, device=where)])


def test_a_group_that_has_ended_refuses_operations(tmp_path: Path) -> None:
    run_cuda(use_what_has_ended, str(tmp_path / "meet"), deadline_s=30)


@pytest.mark.parametrize("late_s", [0.0, 0.5])
def test_an_abort_ends_what_waits(tmp_path: Path, late_s: float) -> None:
    run_cuda(abort, str(tmp_path / "meet"), late_s)
