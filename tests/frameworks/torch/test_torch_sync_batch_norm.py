"""SyncBatchNorm on several ranks equals BatchNorm on one rank with all samples."""

import copy
import io
import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tests.support.plain import backward, enter
from tests.support.ranks import Here, run_ranks
from torch import Tensor, nn

import multiring.torch as mt
from multiring.errors import ArgumentError, UnsupportedError

BOUNDS = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}
LAYERS = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
CHANNELS = 5


@dataclass(frozen=True)
class Case:
    counts: tuple[int, ...]  # samples of each rank
    behind: tuple[int, ...] = (4, 3)  # the dimensions behind the channels
    dtype: torch.dtype = torch.float64
    offset: float = 1.0  # mean of the input
    channels_last: bool = False
    momentum: float | None = 0.1
    affine: bool = True
    track: bool = True

    def layer(self, kind: type[Any]) -> Any:
        """Return a layer of `kind`: float64 for float64 input, otherwise float32."""
        found = kind(CHANNELS, momentum=self.momentum, affine=self.affine, track_running_stats=self.track)
        generator = torch.Generator().manual_seed(1)
        for parameter in found.parameters():
            parameter.data = torch.randn(CHANNELS, generator=generator) + 1.5
        return found.to(torch.float64 if self.dtype == torch.float64 else torch.float32)

    def batch(self, seed: int) -> tuple[Tensor, Tensor]:
        """Return all ranks' samples, and the weights of their outputs in the loss."""
        generator = torch.Generator().manual_seed(seed)
        shape = (sum(self.counts), CHANNELS, *self.behind)
        values = torch.randn(shape, generator=generator, dtype=torch.float64) * 3 + self.offset
        weights = torch.randn(shape, generator=generator, dtype=torch.float64)
        values = values.to(self.dtype)
        if self.channels_last:
            values = values.to(memory_format=torch.channels_last)
        return values, weights.to(self.dtype)

    def own(self, whole: Tensor, rank: int) -> Tensor:
        first = sum(self.counts[:rank])
        return whole[first : first + self.counts[rank]]


CASES = [
    *(Case(counts, behind, dtype) for counts in ((4, 1, 2), (3, 0, 5)) for behind, dtype in [((), torch.float64)]),
    *(Case((2, 1, 3), behind) for behind in [(), (4,), (4, 3), (2, 3, 2)]),
    *(Case((2, 1, 0), dtype=dtype) for dtype in BOUNDS),
    Case((3, 2, 1), dtype=torch.float32, channels_last=True),
    Case((30, 20, 10), dtype=torch.float32, offset=1000.0),
    Case((2, 2, 2), momentum=None),
    Case((2, 1, 2), affine=False),
    Case((2, 1, 2), track=False),
    Case((1, 0, 1), ()),
]


def near(found: Tensor | None, wanted: Tensor | None, bound: float) -> bool:
    assert found is not None
    assert wanted is not None
    assert found.shape == wanted.shape
    exact = wanted.detach().double()
    scale = max(1.0, float(exact.abs().max())) if exact.numel() else 1.0
    return torch.allclose(found.detach().double(), exact, rtol=0, atol=bound * scale)


def test_as_one_rank_with_all_samples() -> None:
    run_ranks(compare, 3)


def compare(here: Here) -> None:
    enter()
    for case in CASES:
        compare_one(case, here.rank, mt.global_process_set)


def compare_one(case: Case, rank: int, process_set: mt.ProcessSet) -> None:
    bound = BOUNDS[case.dtype] * max(1.0, abs(case.offset) / 10)
    plain = case.layer(LAYERS[2 + len(case.behind)])
    if case.dtype in {torch.float32, torch.bfloat16, torch.float16}:
        plain = plain.double()  # the exact result, because rounding differs
    layer = mt.convert_sync_batchnorm(case.layer(nn.BatchNorm2d), process_set)
    assert isinstance(layer, mt.SyncBatchNorm)
    for seed in range(3):
        values, weights = case.batch(seed)
        whole = values.to(torch.float64, copy=True).requires_grad_()
        wanted = plain(whole)
        backward((wanted * weights).sum())
        mine = case.own(values, rank).clone(memory_format=torch.preserve_format).requires_grad_()
        found = layer(mine)
        assert found.dtype == case.dtype
        assert near(found, case.own(wanted, rank), bound), case
        backward((found * case.own(weights, rank)).sum())
        assert whole.grad is not None
        assert near(mine.grad, case.own(whole.grad, rank), bound), case
        if case.track:
            assert near(layer.running_mean, plain.running_mean, bound), case
            assert near(layer.running_var, plain.running_var, bound), case
            assert int(layer.num_batches_tracked or 0) == seed + 1
    for own, all_ranks in zip(layer.parameters(), plain.parameters(), strict=True):
        assert own.grad is not None
        total = mt.allreduce(own.grad.double(), op=mt.Sum, process_set=process_set)
        assert near(total, all_ranks.grad, 10 * bound), case
    # In evaluation no rank waits for another.
    if case.track and rank == 0:
        layer.eval(), plain.eval()
        values, _ = case.batch(9)
        assert near(layer(values), plain(values.to(torch.float64)), bound), case


def test_a_process_set() -> None:
    run_ranks(norm_in_a_set, 3)


def norm_in_a_set(here: Here) -> None:
    pair = mt.ProcessSet([0, 2])
    enter(process_sets=[pair])
    if here.rank != 1:
        compare_one(Case((2, 3)), here.rank // 2, pair)
        compare_one(Case((2, 3), (), torch.float32), here.rank // 2, pair)
    else:
        with pytest.raises(ValueError, match="rank 1 is not in"):
            mt.SyncBatchNorm(CHANNELS, process_set=pair)(torch.ones(2, CHANNELS))
    mt.barrier()


def test_models() -> None:
    run_ranks(train_models, 2)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU()),
        nn.Sequential(nn.Flatten(), nn.Linear(16, 3), nn.BatchNorm1d(3, affine=False)),
    ).double()


def train_models(here: Here) -> None:
    enter()
    plain, converted = model(), model()
    frozen = converted[1].bias
    converted.eval()
    statistics = converted[1].running_mean
    assert mt.convert_sync_batchnorm(converted) is converted
    norms = [each for each in converted.modules() if isinstance(each, mt.SyncBatchNorm)]
    assert [(norm.num_features, norm.affine, norm.training) for norm in norms] == [(4, True, False), (3, False, False)]
    assert converted[1].bias is frozen
    assert converted[1].running_mean is statistics
    assert mt.convert_sync_batchnorm(converted[1]) is converted[1]
    assert list(converted.state_dict()) == list(plain.state_dict())
    converted.train()
    # Copies and loaded layers behave like any other layer.
    other = copy.deepcopy(converted)
    file = io.BytesIO()
    torch.save(converted, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    generator = torch.Generator().manual_seed(3)
    batch = torch.randn(6, 1, 4, 4, dtype=torch.float64, generator=generator)
    wanted = plain(batch)
    mine = slice(0, 2) if here.rank == 0 else slice(2, 6)
    for each in (converted, other, loaded):
        assert near(each(batch[mine]), wanted[mine], 1e-12)
    warnings.simplefilter("default")  # the compiler causes warnings
    compiled = torch.compile(copy.deepcopy(converted), backend="aot_eager")
    assert near(compiled(batch[mine]), plain(batch)[mine], 1e-12)
    # Training needs no gradient of the input, and several layers follow each other.
    optimizer = mt.DistributedOptimizer(
        torch.optim.SGD(converted.parameters(), lr=0.1), converted.named_parameters(), op="sum"
    )
    backward((converted(batch[mine]) ** 3).sum() / 6)
    optimizer.step()
    step = torch.optim.SGD(plain.parameters(), lr=0.1)
    backward((plain(batch) ** 3).sum() / 6)
    step.step()
    for found, expected in zip(converted.parameters(), plain.parameters(), strict=True):
        assert near(found, expected, 1e-12)


def go(layer: nn.Module, output: Tensor, *, is_back: bool) -> None:
    if is_back:
        backward(output.sum())
    else:
        layer(torch.randn(2, CHANNELS))


def test_what_it_refuses() -> None:
    run_ranks(refuse, 2)


def refuse(here: Here) -> None:
    enter()
    layer = mt.SyncBatchNorm(CHANNELS)
    for wrong in (torch.ones(CHANNELS), torch.ones(2, CHANNELS + 1)):
        with pytest.raises(ArgumentError, match=r"expected at least 2D input, \(N, C, ...\) with C = 5"):
            layer(wrong)
    with pytest.raises(UnsupportedError, match="SyncBatchNorm's input is on meta"):
        layer(torch.ones(2, CHANNELS, device="meta"))
    # One rank has one sample, and the other has none: both raise the error.
    with pytest.raises(ArgumentError, match="Expected more than 1 value per channel when training"):
        layer(torch.ones(1 - here.rank, CHANNELS))
    # Errors occur if the ranks call different layers, or if one goes forward and the other backward.
    odd = mt.SyncBatchNorm(CHANNELS + here.rank)
    with pytest.raises(mt.HorovodInternalError, match=r"SyncBatchNorm forward .*the ranks do not agree"):
        odd(torch.ones(2, CHANNELS + here.rank))
    output = layer(torch.randn(2, CHANNELS, requires_grad=True))
    with pytest.raises(mt.HorovodInternalError, match=r"SyncBatchNorm (forward|backward)"):
        go(layer, output, is_back=bool(here.rank))
    nothing = layer(torch.ones(0, CHANNELS, 3, requires_grad=True))
    backward(nothing.sum())
    assert nothing.shape == (0, CHANNELS, 3)
    assert near(layer(torch.ones(2, CHANNELS)), torch.zeros(2, CHANNELS), 1e-6)
