"""DistributedDataParallel over the backend: averages, accumulation, joins, hooks."""

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.lossy import expect_same_bits
from tests.support.plain import backward, loss_of, mean_gradients, network
from tests.support.processes import process_group
from tests.support.ranks import Here, run_ranks
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

RATE = 0.1


def small() -> nn.Module:
    return network(torch.float32)


def parallel(model: nn.Module, **options: Any) -> DistributedDataParallel:
    # Buckets of a few hundred bytes, so that the model has several.
    return DistributedDataParallel(model, **{"bucket_cap_mb": 3e-4, **options})


def test_gradients_are_the_mean_of_the_ranks(tmp_path: Path) -> None:
    run_ranks(average, 3, tmp_path / "store")


def average(here: Here, store: Path) -> None:
    with process_group(here, store) as group:
        for options in ({}, {"gradient_as_bucket_view": True}, {"static_graph": True}, {"init_sync": False}):
            model = parallel(small(), **options)
            optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
            wanted = small()
            for step in range(3):
                optimizer.zero_grad(set_to_none=step == 1)
                backward(loss_of(model, 10 * step + here.rank))
                losses = [seeded(10 * step + rank) for rank in range(here.size)]
                expect_gradients(model, mean_gradients(lambda: copy.deepcopy(wanted), losses))  # noqa: B023 -- called at once
                optimizer.step()
                wanted.load_state_dict(model.module.state_dict())
                expect_same_bits(group, list(model.parameters()))


def test_no_sync_adds_up_and_then_shares(tmp_path: Path) -> None:
    run_ranks(accumulate, 2, tmp_path / "store")


def accumulate(here: Here, store: Path) -> None:
    with process_group(here, store):
        for options in ({}, {"gradient_as_bucket_view": True}):
            model = parallel(small(), **options)
            for first in (0, 20):
                model.zero_grad()
                with model.no_sync():
                    backward(loss_of(model, first + here.rank))
                own = mean_gradients(small, [seeded(first + here.rank)])
                expect_gradients(model, own)
                backward(loss_of(model, first + 10 + here.rank))
                everybodys = [seeded(first + turn + rank) for turn in (0, 10) for rank in range(here.size)]
                expect_gradients(model, [2 * each for each in mean_gradients(small, everybodys)])


class Branches(nn.Module):
    """Three layers; the caller of a forward pass chooses which of them run."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor, chosen: Sequence[int]) -> Tensor:
        for each in chosen:
            x = self.layers[each](x)
        return x


def test_parameters_that_ranks_do_not_use(tmp_path: Path) -> None:
    run_ranks(leave_out, 2, tmp_path / "store")


def leave_out(here: Here, store: Path) -> None:
    """Only rank 1 uses layer 1, and no rank uses layer 2, whose gradient stays None."""
    with process_group(here, store):
        x = torch.arange(8.0).view(2, 4)
        paths = ([0], [0, 1])
        for view in (False, True):
            model = parallel(Branches(), find_unused_parameters=True, gradient_as_bucket_view=view)
            for step in range(3):
                model.zero_grad()
                backward(model(x + here.rank + step, paths[here.rank]).sum())
                losses: list[Callable[[nn.Module], Tensor]] = [
                    lambda model, rank=rank: model(x + rank + step, paths[rank]).sum()  # type: ignore[misc] # noqa: B023 -- called at once
                    for rank in range(2)
                ]
                wanted = mean_gradients(Branches, losses)
                for parameter, mean in zip(model.module.layers[:2].parameters(), wanted[:4], strict=True):
                    assert parameter.grad is not None
                    assert torch.allclose(parameter.grad, mean, rtol=1e-5, atol=1e-5)
                assert all(parameter.grad is None for parameter in model.module.layers[2].parameters())


@pytest.mark.parametrize("initial", [True, False])
def test_ranks_that_run_out_of_samples_join(tmp_path: Path, *, initial: bool) -> None:
    run_ranks(run_out, 3, tmp_path / "store", initial)


def run_out(here: Here, store: Path, initial: bool) -> None:  # noqa: FBT001 -- run_ranks passes it by position
    """Rank r has 2 + r batches.

    With `initial`, a mean counts a rank without batches as zero; otherwise the mean leaves the rank out.
    """
    with process_group(here, store) as group:
        model = parallel(small())
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        with model.join(divide_by_initial_world_size=initial):
            for step in range(2 + here.rank):
                optimizer.zero_grad()
                backward(loss_of(model, 10 * step + here.rank))
                optimizer.step()
        expect_same_bits(group, list(model.parameters()))
        wanted = small()
        for step in range(1 + here.size):
            seeds = [10 * step + rank for rank in range(here.size) if step < 2 + rank]
            means = mean_gradients(lambda: copy.deepcopy(wanted), [seeded(seed) for seed in seeds])
            scale = len(seeds) / here.size if initial else 1.0
            with torch.no_grad():
                for parameter, mean in zip(wanted.parameters(), means, strict=True):
                    parameter.sub_(RATE * scale * mean)
        for ours, theirs in zip(model.parameters(), wanted.parameters(), strict=True):
            assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-6)


def test_ranks_that_run_out_may_end_everybodys_training(tmp_path: Path) -> None:
    run_ranks(end_early, 2, tmp_path / "store")


def end_early(here: Here, store: Path) -> None:
    with process_group(here, store):
        model = parallel(small())
        steps: list[int] = []
        with pytest.raises(RuntimeError, match="exhausted"):
            train(model, 2 + here.rank, steps)
        assert steps == [0, 1]


def train(model: DistributedDataParallel, count: int, steps: list[int]) -> None:
    with model.join(throw_on_early_termination=True):
        for step in range(count):
            backward(loss_of(model, step))
            steps.append(step)


def test_torchs_own_hooks(tmp_path: Path) -> None:
    run_ranks(use_torchs_hooks, 2, tmp_path / "store")


def use_torchs_hooks(here: Here, store: Path) -> None:
    with process_group(here, store) as group:
        for hook, bound in ((default_hooks.allreduce_hook, 1e-5), (default_hooks.fp16_compress_hook, 2e-3)):
            model = parallel(small())
            model.register_comm_hook(None, hook)
            for step in range(2):
                model.zero_grad()
                backward(loss_of(model, 10 * step + here.rank))
                wanted = mean_gradients(small, [seeded(10 * step + rank) for rank in range(here.size)])
                expect_gradients(model, wanted, bound)
                expect_same_bits(group, [parameter.grad for parameter in model.parameters()])


def seeded(seed: int) -> Callable[[nn.Module], Tensor]:
    return lambda model: loss_of(model, seed)


def expect_gradients(model: DistributedDataParallel, wanted: Sequence[Tensor], bound: float = 1e-5) -> None:
    for (name, parameter), mean in zip(model.module.named_parameters(), wanted, strict=True):
        assert parameter.grad is not None, name
        assert torch.allclose(parameter.grad, mean, rtol=0, atol=bound * float(mean.abs().max())), name
